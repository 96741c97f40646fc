"""Built-in probes, one analysis per package: each declares cells and turns every cell into table rows."""
