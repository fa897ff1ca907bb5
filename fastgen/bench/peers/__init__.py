"""Other engines as rows of a benchmark, each a child process in a virtual environment of its own.

`rows` reads the file that names them; `process` talks to a child; ``children/`` is what runs on the other side.
"""

from fastgen.bench.peers.process import PeerTarget
from fastgen.bench.peers.rows import read

__all__ = ["PeerTarget", "read"]
