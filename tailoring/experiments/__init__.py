"""The experiments of the paper: one module each, with `Config`, `quick`, `run` and `report`."""
