"""The sections of a study that come built in, each a room like a probe's: measure, adapt and pretrain."""
