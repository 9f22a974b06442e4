"""The experiments: each is a `Config`, `quick()`, `run(config)` and `report(folder)`."""
