"""The fallback: causal language models that no plugin claims run through transformers' own modelling code, their
attention over fastgen's paged cache. This module stays light: torch and transformers load with the first model."""

from __future__ import annotations

from fastgen.api import ModelSpec, hookimpl

__all__ = ["fastgen_models"]

PATTERNS = ("*ForCausalLM", "*LMHeadModel", "*ModelWithLMHead", "*ForConditionalGeneration", "BertGenerationDecoder")
"""What architectures of causal language models are called. The last but one are mostly refused, with the reason."""


@hookimpl
def fastgen_models() -> list[ModelSpec]:
    return [
        ModelSpec(
            PATTERNS,
            "fastgen_transformers.config:TransformersConfig",
            "fastgen_transformers.hosted:build",
            "fastgen_transformers.config:TIES",
            description="any other causal language model, through transformers' own modelling code",
            fallback=True,
        )
    ]
