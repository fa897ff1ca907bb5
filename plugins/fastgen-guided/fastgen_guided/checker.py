"""A process that compiles grammars from strangers, so that one that takes for ever takes nobody's process with it.

An empty JSON string goes out when it is ready. Then a line goes out for each that comes in: for a grammar, as a JSON
string, what is wrong with it, empty for nothing. One that takes too much of a processor's time ends the process by
SIGPROF. Run as a file: it imports llguidance alone.
"""

from __future__ import annotations

import json
import re
import resource
import signal
import sys
from typing import Any

from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper

IDS = 2**19
"""Token ids that a grammar may speak of here: as many as the largest vocabularies have."""

DEADLINE = 30
"""Seconds for one grammar in all, in case that nobody is left to end this process."""


class _Bytes:
    """A tokenizer with a token for each byte, and ids without a token. A grammar costs little more to compile with a
    larger vocabulary."""

    bos_token_id = None

    def __init__(self) -> None:
        self.tokens = [bytes([byte]) for byte in range(256)] + [b"<end>"] + [b""] * (IDS - 257)
        self.eos_token_id = 256
        self.special_token_ids = [256]

    def __call__(self, text: bytes | str) -> list[int]:
        return list(text.encode() if isinstance(text, str) else text)


def problem(grammar: str, tokenizer: LLTokenizer, limits: LLParserLimits) -> str:
    """Why the grammar cannot be used; empty if it can."""
    matcher = LLMatcher(tokenizer, grammar, log_level=0, limits=limits)
    if not matcher.is_error():
        matcher.compute_bitmask()
    return _plain(matcher.get_error()) if matcher.is_error() else ""


def _plain(error: str) -> str:
    """The sentence of an error, without the place in a text that its reader did not write."""
    first = next((line for line in error.splitlines() if line.strip()), "llguidance refuses it")
    if first.startswith("NoExtension"):
        return "no answer satisfies it"
    return re.sub(r"^(at )?\d+\(\d+\): (failed to compile JSON schema: )?", "", first)


def main(address_space: int, seconds: float, limits: dict[str, Any]) -> None:
    """``seconds``: a processor's time for one grammar."""
    resource.setrlimit(resource.RLIMIT_AS, (address_space, address_space))
    tokenizer = LLTokenizer(TokenizerWrapper(_Bytes()), slices=[])
    bounds = LLParserLimits(**limits, verbose_errors=False)
    print('""', flush=True)  # ready
    for line in sys.stdin:
        # The default of both signals is to end the process, whatever it is busy with.
        signal.setitimer(signal.ITIMER_PROF, seconds)
        signal.alarm(DEADLINE)
        answer = problem(json.loads(line), tokenizer, bounds)
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.alarm(0)
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]), float(sys.argv[2]), json.loads(sys.argv[3]))
