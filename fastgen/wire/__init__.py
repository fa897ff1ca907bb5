"""Bytes between processes: an engine in a process of its own, and the messages it speaks."""
