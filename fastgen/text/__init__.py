"""Letters: text to token ids, token ids back to text as they arrive, stop strings, chat templates."""

from __future__ import annotations

from fastgen.text.chat import check_messages
from fastgen.text.stream import Detokenizer, StopMatcher, TextStream
from fastgen.text.tokenizer import Tokenizer

__all__ = ["Detokenizer", "StopMatcher", "TextStream", "Tokenizer", "check_messages"]
