"""The tokenizer of a checkpoint: text to ids, ids to text, chats to prompts. One for all fronts and threads."""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from fastgen.errors import CheckpointError, ConfigError, InvalidRequestError
from fastgen.text import chat
from fastgen.text.decoders import REPLACEMENT, Chain, Decoder, IdFilter, Window, chain_factory
from fastgen.types import Message

__all__ = ["Tokenizer"]

logger = logging.getLogger("fastgen")

# Any one of these makes a directory one that has a tokenizer; transformers knows what to do with each.
_FILES = ["tokenizer.json", "tokenizer_config.json", "tokenizer.model", "spiece.model", "vocab.json", "vocab.txt"]
_FILES += ["tekken.json", "*.tiktoken", "tiktoken.model", "sentencepiece.bpe.model"]


class Tokenizer:
    """Wraps a transformers tokenizer. Safe to use from many threads at once."""

    def __init__(self, tokenizer: Any, *, name: str = "the model") -> None:
        """``tokenizer``: a transformers tokenizer, from here on this object's alone. ``name``: for messages."""
        self._hf = tokenizer
        self._name = name
        self._backend: Any = tokenizer.backend_tokenizer if getattr(tokenizer, "is_fast", False) else None
        # A fast tokenizer may be read by many threads while none changes its settings; its first call resets
        # padding and truncation stored in the file, and happens here. One in plain Python promises nothing.
        self._lock = threading.Lock()
        tokenizer.encode("", add_special_tokens=True)
        self._new_chain = _new_chain(tokenizer) if self._backend is not None else None
        self._special = _special_ids(tokenizer)
        self._used_ids = frozenset(tokenizer.get_vocab().values())
        self._pieces: dict[int, str | None] = {}
        self._texts: dict[int, str] = {}
        self._settled_texts: dict[bool, dict[int, str]] = {False: {}, True: {}}  # by whether special tokens are skipped
        self._warned_two_bos = False
        self.num_ids = max(self._used_ids, default=-1) + 1
        """The highest id it can decode + 1, added tokens included. Ids below it may be unused."""
        eos = tokenizer.eos_token_id
        self.eos_token_ids: frozenset[int] = frozenset([eos] if isinstance(eos, int) else eos or [])
        """The tokenizer's own end tokens; config files may name more."""
        self.bos_token_id: int | None = tokenizer.bos_token_id

    @staticmethod
    def is_in(directory: Path) -> bool:
        """Whether a checkpoint directory holds any tokenizer's files."""
        return any(any(directory.glob(pattern)) for pattern in _FILES)

    @classmethod
    def load(cls, directory: Path, *, trust_remote_code: bool = False) -> Tokenizer:
        """The tokenizer in a checkpoint directory. Nothing is fetched.

        Raises:
            CheckpointError: no tokenizer files there, or they cannot be read.
            ConfigError: it needs Python code of the checkpoint's own, and ``trust_remote_code`` is off.
        """
        directory = Path(directory)
        if not cls.is_in(directory):
            raise CheckpointError(
                f"{directory} holds no tokenizer (none of {', '.join(_FILES[:4])}, ...). Copy the model's tokenizer"
                " files there, or work with token ids alone"
            )
        from transformers.models.auto.tokenization_auto import AutoTokenizer

        try:
            tokenizer = AutoTokenizer.from_pretrained(
                str(directory),
                local_files_only=True,
                use_fast=True,
                trust_remote_code=trust_remote_code,
                config=_plain_config(directory),
            )
            loaded = cls(tokenizer, name=directory.name)
        except Exception as error:  # many kinds, from three libraries and perhaps the checkpoint's own code
            if not trust_remote_code and "trust_remote_code" in str(error):
                raise ConfigError(
                    f"the tokenizer in {directory} is Python code that came with the checkpoint. Read it, and set"
                    " trust_remote_code=True if you let it run"
                ) from error
            raise CheckpointError(f"the tokenizer in {directory} cannot be loaded: {_first_line(error)}") from error
        if not loaded.num_ids:
            raise CheckpointError(f"the tokenizer in {directory} has an empty vocabulary")
        return loaded

    @property
    def has_chat_template(self) -> bool:
        return bool(self._hf.chat_template)

    def template_text(self, template: str | None = None, *, tools: bool = False) -> str | None:
        """The Jinja text that ``render_chat`` would render for this ``template``, with ``tools`` or without. ``None``
        where there is none."""
        own = self._hf.chat_template
        if isinstance(own, dict):
            names = [template] if template is not None else ["tool_use", "default"] if tools else ["default"]
            found = next((own[name] for name in names if name in own), template)
        else:
            found = template or own
        return found if isinstance(found, str) and "{" in found else None

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of ``text``. ``add_special_tokens``: let the tokenizer add BOS and the like, as it was trained.

        Raises:
            InvalidRequestError: not a string, or one that is not valid Unicode.
        """
        if not isinstance(text, str):
            raise InvalidRequestError(f"a prompt must be a string, got {type(text).__name__}", field="prompt")
        try:
            ids = self._encode(text, add_special_tokens)
        except Exception as error:
            problem = _encode_problem(text, error)
            raise InvalidRequestError(f"the prompt cannot be tokenised: {problem}", field="prompt") from error
        if add_special_tokens and self.bos_token_id is not None and ids[:2] == [self.bos_token_id] * 2:
            self._warn_two_bos()
        return ids

    def render_chat(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Any] | None = None,
        add_generation_prompt: bool | None = None,
        continue_final_message: bool = False,
        template: str | None = None,
        **variables: Any,
    ) -> str:
        """The prompt text for a conversation, by the model's chat template in transformers' sandbox.

        Args:
            messages: ``[{"role": ..., "content": ...}, ...]``, at least one.
            tools: functions the model may call, as JSON schemas or annotated Python functions.
            add_generation_prompt: end with the opening of the assistant's answer. Unset: yes, unless
                ``continue_final_message``.
            continue_final_message: leave the last message open, for the model to go on with.
            template: Jinja text, or the name of one of the model's templates, instead of its default.
            variables: whatever else the template reads, such as ``enable_thinking=False``.

        Raises:
            InvalidRequestError: bad messages, no template, or the template refused them, in its own words.
        """
        return chat.render(
            self._hf,
            messages,
            tools=tools,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            template=template,
            variables=variables,
        )

    def encode_chat(
        self, messages: Sequence[Message], *, add_special_tokens: bool = False, **options: Any
    ) -> list[int]:
        """Token ids of ``render_chat(messages, **options)``. The template writes BOS and the like itself, so the
        tokenizer adds none unless told to."""
        return self.encode(self.render_chat(messages, **options), add_special_tokens=add_special_tokens)

    def decode(self, ids: Iterable[int], *, skip_special_tokens: bool = True) -> str:
        """Text of ``ids``, the same as a ``Detokenizer`` gives piece by piece. Ids without a token add nothing.

        Equals transformers' ``decode(ids, clean_up_tokenization_spaces=False)``, but for runs of byte-fallback tokens
        that mix whole characters with ill-formed bytes (``fastgen.text.decoders.ByteFallback``).
        """
        feed = self.decoder(skip_special_tokens=skip_special_tokens)
        return "".join([feed.push(token) for token in ids]) + feed.flush()

    def token_text(self, token_id: int) -> str:
        """One token's own text as it reads inside an answer (leading space kept); special tokens by name; U+FFFD for
        part of a character; empty for an id that has no token. Never raises."""
        text = self._texts.get(token_id)
        if text is None:
            if self._new_chain is None:
                text = self._decode_black_box([token_id]) if self._known(token_id) is not None else ""
            else:
                chain = self._new_chain()
                chain.begin()
                piece = self._piece(token_id)
                text = "" if piece is None else chain.push(piece) + chain.flush()
            self._texts[token_id] = text
        return text

    def token_bytes(self, token_id: int) -> bytes | None:
        """The UTF-8 that one token adds inside an answer, which may be part of a character; ``None`` for special tokens
        and ids without a token, which add nothing, and where a decoder in plain Python does not tell. Never raises.

        At the very start of an answer a tokenizer may leave out a leading space that is in these bytes.
        """
        if token_id in self._special:
            return None
        if self._new_chain is None:
            text = self.token_text(token_id)
            return text.encode("utf-8") if text and REPLACEMENT not in text else None
        piece = self._piece(token_id)
        if piece is None:
            return None
        chain = self._new_chain()
        chain.begin()
        return chain.raw(piece)

    def decoder(self, *, skip_special_tokens: bool) -> Decoder:
        """A fresh incremental decoder of token ids, for one answer."""
        skip = self._special if skip_special_tokens else frozenset[int]()
        texts = self._settled_texts[skip_special_tokens]
        if self._new_chain is not None:
            return IdFilter(self._new_chain(), self._piece, skip, texts)
        return IdFilter(Window(self._decode_black_box), self._known, skip, texts)

    def _encode(self, text: str, add_special_tokens: bool) -> list[int]:
        def run() -> list[int]:
            return list(self._hf.encode(text, add_special_tokens=add_special_tokens, verbose=False))

        if self._backend is not None:
            return run()
        with self._lock:
            return run()

    def _piece(self, token_id: int) -> str | None:
        """The vocabulary's string for an id."""
        try:
            return self._pieces[token_id]
        except KeyError:
            piece = self._backend.id_to_token(token_id) if 0 <= token_id < self.num_ids else None
            self._pieces[token_id] = piece
            return piece

    def _known(self, token_id: int) -> int | None:
        """The id itself where it has a token."""
        return token_id if token_id in self._used_ids else None

    def _decode_black_box(self, ids: list[int]) -> str:
        with self._lock:
            return str(self._hf.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False))

    def _warn_two_bos(self) -> None:
        if self._warned_two_bos:
            return
        self._warned_two_bos = True
        logger.warning(
            "a prompt begins with the text of the BOS token, and the tokenizer of %s adds BOS as well: the model sees"
            " two. Leave it out of the text, or pass add_special_tokens=False. (Said once.)",
            self._name,
        )


def _new_chain(tokenizer: Any) -> Callable[[], Chain] | None:
    """A maker of incremental decoders for a fast tokenizer; ``None`` where it decodes in a way of its own."""
    from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

    kind = type(tokenizer)
    if kind.decode is not PreTrainedTokenizerBase.decode or kind._decode is not PreTrainedTokenizerFast._decode:
        return None
    decoder = tokenizer.backend_tokenizer.decoder
    try:
        spec = None if decoder is None else json.loads(decoder.__getstate__())
    except Exception:  # a decoder written in Python has no such description
        return None
    return chain_factory(spec)


def _special_ids(tokenizer: Any) -> frozenset[int]:
    added = tokenizer.added_tokens_decoder
    return frozenset(tokenizer.all_special_ids) | {token for token, entry in added.items() if entry.special}


def _plain_config(directory: Path) -> Any:
    """What transformers looks at in a model's config to choose a tokenizer's class, where the tokenizer's own config
    names a class of the library's. ``None`` where it does not: then transformers makes the model's config of its
    family's class, and imports modelling code for that, which takes longer than reading most tokenizers."""
    from transformers.configuration_utils import PreTrainedConfig

    try:
        own = json.loads((directory / "tokenizer_config.json").read_bytes())
        model = json.loads((directory / "config.json").read_bytes())
    except (OSError, ValueError):
        return None
    if not isinstance(own, dict) or not isinstance(model, dict) or "auto_map" in own or "auto_map" in model:
        return None
    if not isinstance(own.get("tokenizer_class"), str) or not isinstance(model.get("model_type"), str):
        return None
    config = PreTrainedConfig()
    config.model_type, config.tokenizer_class = model["model_type"], model.get("tokenizer_class")
    config._name_or_path = str(directory)
    if "model_name" in model:
        config.model_name = model["model_name"]
    return config


def _encode_problem(text: str, error: Exception) -> str:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as bad:
        return f"character {bad.start} is {text[bad.start]!r}, half of a surrogate pair and not a character"
    return _first_line(error)


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
