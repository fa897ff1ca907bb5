"""The conformance kit: what an adapter must do to be one, as tests that its author inherits.

::

    from fastgen.testing import ModelConformance

    class TestFoo(ModelConformance):
        entry = "fastgen_foo"
        hf_config = {
            "plain": {"model_type": "foo", "hidden_size": 32},
            "tied": {"model_type": "foo", "tie_word_embeddings": True},
        }
"""

from __future__ import annotations

import os
import random
import subprocess
import sys
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

from fastgen.core.plugin import PluginRecord, register, registry
from fastgen.core.plugin.conformance import FAULT
from fastgen.errors import FastgenError, UnsupportedModelError
from fastgen.testing import engine_checks, weight_checks
from fastgen.testing.faults import planted_faults
from fastgen.testing.parity import allowed, difference
from fastgen.testing.plugin import PROPERTY
from fastgen.testing.subject import BLOCK, REACH, Reference, Subject, hooks_of, missing, serving, transformers_config

__all__ = ["ModelConformance"]

_NOTICED = 10  # a planted fault must move the logits by this many times what is allowed
_HEAVY = ("torch", "transformers", "triton")


class ModelConformance:
    """Inherit it, name the plugin's ``entry`` and one or more configs, and run pytest.

    Each config is built at tiny size with random weights by transformers, whose eager float32 logits are the measure
    of all checks. What a failing check says is meant for the adapter's author.
    """

    entry: ClassVar[str]
    """The module with the hooks, as in the plugin's entry point (or ``module:attribute``)."""
    hf_config: ClassVar[Mapping[str, Any]]
    """One config (with ``model_type``, as in config.json), or ``{case: config}``. Sizes left out are those of
    ``fastgen.testing.TINY``."""
    architecture: ClassVar[str | None] = None
    """Where the saved config.json would not name it."""
    write_checkpoint: ClassVar[Callable[[Path, dict[str, Any]], None] | None] = None
    """``(directory, config)``, a staticmethod: writes config.json and weights where transformers has no class; see
    ``fastgen.testing.checkpoints.write_random``."""
    reference: ClassVar[Callable[[Path], Reference] | None] = None
    """``(directory) -> (ids) -> logits [tokens, vocab]``, a staticmethod: the measure in place of transformers."""
    tolerance: ClassVar[float] = 1e-4
    """Largest difference of two logits that counts as rounding, for logits up to about 16, in proportion above."""
    flip_tie: ClassVar[bool] = True
    """Whether checkpoints exist with the head tied to the embedding and not; if so, the other is tried too."""
    not_applicable: ClassVar[Mapping[str, str]] = {}
    """``{beginning of a planted fault's name: why it cannot change the logits of this family}``: forgiven in the cases
    where it goes unnoticed."""

    # ---- machinery -------------------------------------------------------------------------------------------------

    @classmethod
    def cases(cls) -> dict[str, Mapping[str, Any]]:
        """``{name: config}``."""
        given = cls.hf_config
        return {"default": given} if "model_type" in given else dict(given)

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        if (why := missing(type(self).entry)) is not None:
            raise pytest.Collector.CollectError(why)  # said once, where every test would say it
        if "case" in metafunc.fixturenames:
            metafunc.parametrize("case", list(type(self).cases()), scope="class")

    @pytest.fixture
    def plugin(self, request: pytest.FixtureRequest) -> Callable[[], PluginRecord]:
        """The plugin under test, registered when it is first asked for: a broken one fails tests, not their setup."""
        return _shared(request).plugin

    @pytest.fixture
    def subject(
        self,
        request: pytest.FixtureRequest,
        case: str,
        account: dict[str, Any],
        tmp_path_factory: pytest.TempPathFactory,
    ) -> Callable[[], Subject]:
        """The case's checkpoint, reference and decoder: made once for all of its tests, when they are asked for."""

        def get() -> Subject:
            one = _shared(request).subject(case, tmp_path_factory)
            account["architecture"] = one.served_architecture
            return one

        return get

    @pytest.fixture(autouse=True)
    def account(self, request: pytest.FixtureRequest) -> dict[str, Any]:
        """What this test tells the report."""
        case = getattr(request.node, "callspec", None)
        name = case.params.get("case", "") if case is not None else ""
        account: dict[str, Any] = {
            "entry": request.cls.entry,
            "class": request.cls.__name__,
            "case": name,
            "architecture": None,
            "test": _check(request.node.originalname),
            "checks": {},
            "expected": _expected(of_case=bool(name)),
        }
        request.node.user_properties.append((PROPERTY, account))
        return account

    @pytest.fixture
    def told(self, account: dict[str, Any]) -> dict[str, str]:
        """What this test checks besides itself: ``{check: outcome}``."""
        checks: dict[str, str] = account["checks"]
        return checks

    # ---- weights ---------------------------------------------------------------------------------------------------

    def test_weights_fill_everything(self, subject: Callable[[], Subject]) -> None:
        """Parameters are NaN before loading and none after; every number of the file lands in its place."""
        weight_checks.check_filled(subject())
        weight_checks.check_landing(subject())

    @pytest.mark.slow
    def test_weights_in_shards(self, subject: Callable[[], Subject], tmp_path: Path) -> None:
        weight_checks.check_shards(subject(), tmp_path / "shards")

    @pytest.mark.slow
    def test_weights_missing_and_extra(self, subject: Callable[[], Subject]) -> None:
        weight_checks.check_refusals(subject())

    # ---- parity ----------------------------------------------------------------------------------------------------

    def test_prefill(self, subject: Callable[[], Subject], told: dict[str, str]) -> None:
        """One token, and one long prompt: all positions, past the window and the rope's original length."""
        one = subject()
        for length in (1, one.length):
            ids, driver = one.ids(length), one.driver()
            one.compare(driver.read(driver.add(ids), length), ids, f"a prompt of {length} tokens", alone=True)
        for name, marks, key in (
            ("window", one.windows, "sliding_window"),
            ("rope length", one.originals, "original_max_position_embeddings (dynamic: max_position_embeddings)"),
        ):
            told[name] = "pass" if marks else "n.a."
            if (mark := one.out_of_reach(marks)) is not None:
                told[name] = "fail"
                raise AssertionError(
                    f"the {name} of {mark} tokens is out of the kit's reach, so nothing was checked beyond it: write a "
                    f"{key} of at most {REACH}, and max_position_embeddings above it (it allows {one.length} tokens)"
                )

    @pytest.mark.slow
    def test_chunks(self, subject: Callable[[], Subject]) -> None:
        one = subject()
        ids = one.ids(one.length)
        for chunk in (1, BLOCK - 1, BLOCK, BLOCK + 1):
            driver = one.driver()
            one.compare(driver.read(driver.add(ids), chunk), ids, f"a prompt in pieces of {chunk} (blocks of {BLOCK})")

    @pytest.mark.slow
    def test_decode(self, subject: Callable[[], Subject]) -> None:
        """Most of the prompt at once, then a token a pass, in blocks that lie in order."""
        one = subject()
        ids, driver = one.ids(one.length), one.driver(shuffle=None)
        sequence = driver.add(ids)
        rows = driver.run([(sequence, max(1, len(ids) - 3 * BLOCK))])
        rows += [driver.run([(sequence, 1)])[0] for _ in range(len(ids) - sequence.num_computed)]
        one.compare(torch.cat(rows), ids, "a prompt, then one token a pass")

    @pytest.mark.slow
    def test_ragged(self, subject: Callable[[], Subject]) -> None:
        """Decodes of unlike lengths, pieces and whole prompts in one pass, in an order that changes, over scattered
        blocks in which others left NaN."""
        one = subject()
        lengths = sorted({min(n, one.length) for n in (1, 2, 6, 9, 21, one.length)})
        driver = one.driver(shuffle=5)
        _leave_nan(driver.builder.caches)
        rng = random.Random(1)
        sequences = [driver.add(one.ids(length, seed=length)) for length in lengths]
        rows: list[list[torch.Tensor]] = [[] for _ in sequences]
        while pending := [s for s in sequences if s.num_computed < len(s.tokens)]:
            rng.shuffle(pending)
            # Every third has its whole prompt in one pass, the others come in pieces and single tokens.
            pieces = [len(s.tokens) if sequences.index(s) % 3 == 0 else rng.choice([1, 1, 3, 7]) for s in pending]
            work = [(s, min(n, len(s.tokens) - s.num_computed)) for s, n in zip(pending, pieces, strict=True)]
            work = work[: rng.randint(1, len(work))]
            for (sequence, _), logits in zip(work, driver.run(work), strict=True):
                rows[sequences.index(sequence)].append(logits)
        for sequence, found in zip(sequences, rows, strict=True):
            what = f"a sequence of {len(sequence.tokens)} tokens among {len(sequences)} in ragged passes"
            one.compare(torch.cat(found), sequence.tokens, what)

    # ---- the engine ------------------------------------------------------------------------------------------------

    @pytest.mark.slow
    def test_preempted(self, subject: Callable[[], Subject]) -> None:
        """Greedy answers of an engine too small for its requests, so that it preempts and resumes them."""
        engine_checks.check_preempted(subject())

    @pytest.mark.slow
    def test_prefix_hit(self, subject: Callable[[], Subject]) -> None:
        engine_checks.check_prefix_hit(subject())

    # ---- sensitivity -----------------------------------------------------------------------------------------------

    @pytest.mark.slow
    def test_sensitivity(self, subject: Callable[[], Subject], told: dict[str, str]) -> None:
        """Every planted fault that applies moves the logits: the checks above would notice it."""
        one = subject()
        unnoticed: list[str] = []
        one.compare(one.prefill(), one.ids(one.length), "before any fault is planted, the long prompt", alone=True)
        noticed = _foreign_block_noticed(one)
        told[f"{FAULT}foreign block"] = "n.a." if noticed is None else "pass" if noticed else "fail"
        if noticed is False:
            unnoticed.append("foreign block (a block of another sequence in the table, between two pieces of a prompt)")
        for fault in planted_faults(one.decoder):
            if fault.plant is None:
                told[FAULT + fault.name] = "n.a."
                continue
            with fault.plant():
                moved = _moved(one)
            exempt = any(fault.name.startswith(name) for name in type(self).not_applicable)
            told[FAULT + fault.name] = "pass" if moved else "n.a." if exempt else "fail"
            if not moved and not exempt:
                unnoticed.append(f"{fault.name}{f' ({fault.hint})' if fault.hint else ''}")
        assert not unnoticed, (
            f"the checks of this case would not notice these mistakes: {'; '.join(unnoticed)}. Choose a config in "
            "which they matter, or, where they cannot change this family's logits, say why in not_applicable"
        )

    # ---- once a class ----------------------------------------------------------------------------------------------

    @pytest.mark.slow
    def test_tied_and_untied(self, plugin: Callable[[], PluginRecord], told: dict[str, str], tmp_path: Path) -> None:
        """The first case once more, with the head tied to the embedding if it was not, and the other way round."""
        cls = type(self)
        told["tied and untied"] = "n.a."
        if not cls.flip_tie or cls.write_checkpoint is not None:
            return
        cases = [dict(fields) for fields in cls.cases().values()]
        tied = [bool(transformers_config(fields).tie_word_embeddings) for fields in cases]
        if len(set(tied)) == 2:
            told["tied and untied"] = "pass"  # cases of their own
            return
        other = _subject(cls, plugin(), {**cases[0], "tie_word_embeddings": not tied[0]}, tmp_path)
        try:
            weight_checks.check_landing(other)
            ids = other.ids(other.length)
            other.compare(other.prefill(), ids, f"the first case {'untied' if tied[0] else 'tied'}", alone=True)
        except UnsupportedModelError:
            return  # the adapter says so itself
        except FastgenError as error:
            raise AssertionError(
                f"with tie_word_embeddings = {not tied[0]} the first case does not load: {error} Build the head by "
                "config.tie_word_embeddings, or, if the family's checkpoints are all alike, set flip_tie = False"
            ) from error
        told["tied and untied"] = "pass"

    def test_registers_twice(self, plugin: Callable[[], PluginRecord]) -> None:
        """Registering the plugin when it is there already changes nothing: scripts import entry modules too."""
        record, before = plugin(), registry().fingerprint()
        if record.distribution and ":" in type(self).entry:
            return  # the object of an installed plugin cannot be told from another of its type
        again = register(hooks_of(type(self).entry), name=record.name if record.in_process else None)
        assert (again.name, again.architectures) == (record.name, record.architectures)
        assert registry().fingerprint() == before

    @pytest.mark.slow
    def test_entry_is_light(self) -> None:
        """Importing the entry module, in a process of its own, loads neither torch nor transformers nor triton."""
        module = type(self).entry.partition(":")[0]
        code = f"import sys, {module}; print(*(n for n in {_HEAVY!r} if n in sys.modules))"
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
        done = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, env=environment, timeout=120, check=False
        )
        assert done.returncode == 0, f"{module} cannot be imported by itself:\n{done.stderr}"
        assert not done.stdout.split(), (
            f"importing {module} loads {' and '.join(done.stdout.split())}: import what needs it inside build, or name "
            "it by a 'module:attribute' string"
        )


class _Shared:
    """What the tests of one class share: the plugin, and the latest case (they run case by case)."""

    def __init__(self, cls: type[ModelConformance]) -> None:
        self.cls, self.exit = cls, ExitStack()
        self._record: PluginRecord | None = None
        self._case: tuple[str, Subject] | None = None

    def plugin(self) -> PluginRecord:
        if self._record is None:
            self._record = self.exit.enter_context(serving(self.cls.entry))
        return self._record

    def subject(self, case: str, folders: pytest.TempPathFactory) -> Subject:
        if self._case is None or self._case[0] != case:
            fields = self.cls.cases()[case]
            self._case = case, _subject(self.cls, self.plugin(), fields, folders.mktemp("conformance"))
        return self._case[1]


_SHARED = pytest.StashKey[_Shared]()


def _shared(request: pytest.FixtureRequest) -> _Shared:
    node = request.node.getparent(pytest.Class)
    if _SHARED not in node.stash:
        node.stash[_SHARED] = _Shared(request.cls)

        def leave() -> None:
            node.stash[_SHARED].exit.close()
            del node.stash[_SHARED]

        node.addfinalizer(leave)
    shared: _Shared = node.stash[_SHARED]
    return shared


def _subject(cls: type[ModelConformance], record: PluginRecord, fields: Mapping[str, Any], folder: Path) -> Subject:
    return Subject(record, fields, folder, cls.tolerance, cls.architecture, cls.write_checkpoint, cls.reference)


def _check(test: str) -> str:
    """A check's name in the report."""
    return test.removeprefix("test_").replace("_", " ")


def _expected(*, of_case: bool) -> list[str]:
    """The kit's own tests: those of each case, or those of the class."""
    tests = [name for name in vars(ModelConformance) if name.startswith("test_")]
    takes = {name: "subject" in vars(ModelConformance)[name].__code__.co_varnames for name in tests}
    return [_check(name) for name in tests if takes[name] == of_case]


def _moved(one: Subject) -> bool:
    """Whether the decoder, as it is now, is plainly wrong about the long prompt."""
    want = one.want(one.ids(one.length))
    try:
        got = one.prefill()
    except (RuntimeError, IndexError):
        return True  # shapes do not fit, a table has no such row: it does not even run
    return bool(difference(got, want).max() > _NOTICED * allowed(want, one.tolerance))


def _leave_nan(caches: list[Any]) -> None:
    """As if requests that overflowed had used the blocks before."""
    for cache in caches:
        for tensor in cache if isinstance(cache, tuple | list) else [cache]:
            if isinstance(tensor, torch.Tensor) and tensor.is_floating_point():
                tensor.fill_(float("nan"))


def _foreign_block_noticed(one: Subject) -> bool | None:
    """Whether pieces of a prompt show that, between them, a block of the sequence became another one; ``None`` for a
    decoder without a cache."""
    if not list(one.decoder.attentions()):
        return None
    driver, ids = one.driver(), one.ids(one.length)
    sequence = driver.add(ids)
    rows = driver.run([(sequence, len(ids) // 2)])
    driver.replace_block(sequence, (sequence.num_computed - 1) // BLOCK)
    rows += driver.run([(sequence, len(ids) - len(ids) // 2)])
    want = one.want(ids)
    return bool(difference(torch.cat(rows), want).max() > _NOTICED * allowed(want, one.tolerance))
