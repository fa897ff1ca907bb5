"""What runs inside a peer's own virtual environment: `serve.py`, and beside it an adapter an engine.

These files are started by path with the peer's interpreter (3.10 or newer), where fastgen is not installed: each needs
the standard library and its engine alone, and is given `fastgen/bench/drive.py` by path. An adapter is a file with a
class `Engine`, as `serve.Adapter` says.
"""
