"""The one seam between headscope and a model: kernel, attention and mask function, and the record a layer hands on."""
