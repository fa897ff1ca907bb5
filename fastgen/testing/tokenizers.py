"""Small tokenizers in Hugging Face layout, made here and not downloaded."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fastgen.text.decoders import byte_of_character

if TYPE_CHECKING:
    import tokenizers

__all__ = ["BOS", "CHAT_TEMPLATE", "EOS", "PAD", "build_byte_tokenizer", "byte_tokenizer", "save_tokenizer"]

BOS, EOS, PAD = "<bos>", "<eos>", "<pad>"

CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}[{{ message.role }}]{{ message.content }}{{ eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)
"""A small template in the usual style, which writes BOS itself."""


def build_byte_tokenizer(
    *, specials: Sequence[str] = (BOS, EOS, PAD), merges: Sequence[tuple[bytes, bytes]] = (), add_bos: bool = False
) -> tokenizers.Tokenizer:
    """A byte-level BPE tokenizer whose token ``b`` is the byte ``b``: ids 0 to 255, then one id for each of ``merges``,
    then the special tokens. It can encode every text; every id sequence is a byte string.

    Args:
        specials: texts of the special tokens.
        merges: pairs of byte strings that become one token, in order; both sides must be tokens already.
        add_bos: put the first special token before every text, as many models' tokenizers do.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors

    shown = {byte: character for character, byte in byte_of_character().items()}
    vocabulary = {shown[byte]: byte for byte in range(256)}
    pairs: list[tuple[str, str]] = []
    for left, right in merges:
        pair = ("".join(shown[byte] for byte in left), "".join(shown[byte] for byte in right))
        vocabulary["".join(pair)] = len(vocabulary)
        pairs.append(pair)
    tokenizer = Tokenizer(models.BPE(vocabulary, pairs))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(specials))
    if add_bos:
        bos = specials[0]
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{bos} $A", special_tokens=[(bos, tokenizer.token_to_id(bos))]
        )
    return tokenizer


def save_tokenizer(
    tokenizer: tokenizers.Tokenizer,
    directory: str | Path,
    *,
    chat_template: str | Mapping[str, str] | None = None,
    **special_tokens: Any,
) -> Path:
    """Write ``tokenizer.json``, ``tokenizer_config.json`` and the chat template files, as transformers does.

    Args:
        chat_template: Jinja text, or several by name.
        special_tokens: ``bos_token``, ``eos_token``, ...: text of each.
    """
    from transformers import PreTrainedTokenizerFast

    saved = PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special_tokens)
    saved.chat_template = dict(chat_template) if isinstance(chat_template, Mapping) else chat_template
    saved.save_pretrained(str(directory))
    return Path(directory)


def byte_tokenizer(
    directory: str | Path,
    *,
    chat_template: str | Mapping[str, str] | None = CHAT_TEMPLATE,
    merges: Sequence[tuple[bytes, bytes]] = (),
    add_bos: bool = False,
) -> Path:
    """Write the byte-level tokenizer of ``build_byte_tokenizer`` to ``directory``, with ``<bos>`` (id 256 if there are
    no merges), ``<eos>`` (257), ``<pad>`` (258), and a chat template unless ``None``."""
    tokenizer = build_byte_tokenizer(merges=merges, add_bos=add_bos)
    return save_tokenizer(
        tokenizer, directory, chat_template=chat_template, bos_token=BOS, eos_token=EOS, pad_token=PAD
    )
