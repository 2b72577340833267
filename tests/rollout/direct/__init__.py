"""Weight updates straight into an engine's parameters; `test_direct.py` runs the checks, `*_checks.py`."""
