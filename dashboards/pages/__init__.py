"""One module a page: `NAME`, `PATH`, the `CONTROLS` it asks for, and `content`, a function of the run and the view."""
