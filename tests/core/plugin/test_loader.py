"""F1: a broken plugin costs a line and its own models, never anybody else's."""

from __future__ import annotations

from collections.abc import Callable
from importlib.metadata import entry_points

import pytest

import fastgen
from fastgen.core.plugin import PluginRecord, Registry, load_registry
from fastgen.core.plugin.loader import likely_architectures
from fastgen.errors import ConfigError, PluginError
from fastgen.testing.distributions import FakeSite

GOOD = """
    from fastgen import api as fg

    @fg.hookimpl
    def fastgen_models():
        return [fg.ModelSpec(("GoodForCausalLM",), "x:Config", "x:build", "x:WEIGHTS")]
"""
SPEC = 'fg.ModelSpec(("FooForCausalLM",), "x:Config", "x:build", "x:WEIGHTS")'
HEAD = "from fastgen import api as fg\n"


def hook(body: str, name: str = "fastgen_models", arguments: str = "", mark: str = "@fg.hookimpl") -> str:
    return f"{HEAD}{mark}\ndef {name}({arguments}):\n    {body}\n"


BROKEN = {
    "import error": ("import no_such_module_anywhere", "ModuleNotFoundError: No module named 'no_such_module"),
    "any exception": ("1 / 0", "ZeroDivisionError: division by zero"),
    "sys.exit at import": ("import sys; sys.exit(3)", "it called sys.exit(3)"),
    "sys.exit in a hook": (hook("raise SystemExit"), "it called sys.exit()"),
    "a bare BaseException": (hook("raise BaseException('native panic')"), "BaseException: native panic"),
    "an error without a text": (
        "class E(Exception):\n    def __str__(self): raise RuntimeError('no')\nraise E",
        "E, whose text cannot be shown (RuntimeError)",
    ),
    "an error without an end": ("raise ValueError('x' * 10**6)", f"ValueError: {'x' * 900}"),
    "syntax error": ("def f(:", "SyntaxError"),
    "misspelt hook": (hook("return []", "fastgen_model"), "no hook 'fastgen_model'. Did you mean 'fastgen_models'"),
    "misspelt argument": (hook("return []", arguments="regsitry"), "regsitry"),
    "unmarked hook": (hook("return []", mark=""), "fastgen_models is not marked with @fastgen.api.hookimpl"),
    "unmarked and misspelt": (hook("return []", "fastgen_modles", mark=""), "did you mean 'fastgen_models'"),
    "no hook": ("x = 1", "it implements no hook"),
    "wrapper": (hook("yield", mark="@fg.hookimpl(wrapper=True)"), "hook wrapper"),
    "forgotten return": (hook(SPEC), "fastgen_models returned None; it must return a list of ModelSpec"),
    "forgotten list": (hook(f"return {SPEC}"), "it must return a list of ModelSpec"),
    "wrong kind": (hook("return [fg.CommandSpec('x', 'x:y')]"), "it must hold ModelSpec objects"),
    "raises half-way": (hook(f"return [{SPEC}, fg.ModelSpec((), 'x:C', 'x:b', 'x:W')]"), "architectures is empty"),
    "claims twice": (hook(f"return [{SPEC}, {SPEC}]"), "it claims 'FooForCausalLM' in two ModelSpecs"),
}


@pytest.fixture
def load(site: FakeSite) -> Callable[..., Registry]:
    """Load one more plugin called foo with this source, beside one called good that works."""

    def load(source: str = GOOD, **options: object) -> Registry:
        site.add("fastgen-good", entries={"good": "good_plugin"}, modules={"good_plugin": GOOD})
        settings = {"entries": {"foo": "foo_plugin"}, "modules": {"foo_plugin": source}, **options}
        site.add("fastgen-foo", **settings)  # type: ignore[arg-type]
        return load_registry()

    return load


def foo(registry: Registry) -> PluginRecord:
    return registry.record("foo")


@pytest.mark.parametrize("case", BROKEN)
def test_f1_broken_plugin_is_isolated(
    load: Callable[..., Registry], case: str, capfd: pytest.CaptureFixture[str]
) -> None:
    source, message = BROKEN[case]
    registry = load(source)
    assert foo(registry).status == "failed"
    assert message in (foo(registry).error or "")
    assert foo(registry).specs == ()
    assert "FooForCausalLM" not in [row.architecture for row in registry.model_rows()]
    assert registry.find_model("GoodForCausalLM").plugin == "good"
    lines = capfd.readouterr().err.splitlines()
    assert len(lines) == 1
    assert "'foo' (fastgen-foo 1.0) is broken" in lines[0]


def test_entry_point_that_names_no_module(load: Callable[..., Registry]) -> None:
    registry = load(entries={"foo": "foo-plugin"})
    assert foo(registry).error == "its entry point says 'foo-plugin'; it must say 'module' or 'module:attribute'"
    assert registry.find_model("GoodForCausalLM").plugin == "good"


def test_working_plugin_is_loaded_and_stamped(load: Callable[..., Registry]) -> None:
    registry = load(hook(f"return [{SPEC}]"))
    assert foo(registry) == registry.record(registry.find_model("FooForCausalLM").plugin)
    record = foo(registry)
    assert (record.status, record.distribution, record.version) == ("loaded", "fastgen-foo", "1.0")
    assert record.architectures == ("FooForCausalLM",)


def test_f1_registration_is_undone_when_a_later_hook_raises(load: Callable[..., Registry]) -> None:
    """The models hook succeeds, the commands hook fails: neither stays, and the models are remembered as its own."""
    registry = load(hook(f"return [{SPEC}]") + hook("raise OSError('disk')", "fastgen_commands"))
    assert registry.commands == ()
    assert foo(registry).architectures == ("FooForCausalLM",)
    with pytest.raises(PluginError, match=r"FooForCausalLM belongs to the plugin 'foo'.*OSError: disk"):
        registry.find_model("FooForCausalLM")


def test_keyboard_interrupt_is_not_swallowed(load: Callable[..., Registry]) -> None:
    with pytest.raises(KeyboardInterrupt):
        load("raise KeyboardInterrupt")


def test_optional_hook_of_another_version_is_allowed(load: Callable[..., Registry]) -> None:
    later = hook("return []", "fastgen_of_the_future", mark="@fg.hookimpl(optionalhook=True)")
    assert foo(load(hook("return []") + later)).status == "loaded"


def test_traceback_begins_at_the_plugin(load: Callable[..., Registry]) -> None:
    text = foo(load("def deep():\n    return {}['gone']\ndeep()\n")).traceback or ""
    assert text.startswith("Traceback (most recent call last):\n")
    assert "foo_plugin.py" in text.splitlines()[1]
    assert text.endswith("KeyError: 'gone'")
    assert "loader.py" not in text


@pytest.mark.parametrize(
    ("requires", "status"),
    [
        (["fastgen>=0.1,<0.2"], "loaded"),
        (["fastgen"], "loaded"),
        (["torch", "fastgen-other>=99"], "loaded"),
        ([], "loaded"),
        (["fastgen>=99; extra == 'test'"], "loaded"),
        (["fastgen (>=0.1)"], "loaded"),
        (["fastgen @ https://example.invalid/fastgen.whl"], "loaded"),
        (["fastgen<0.1"], "failed"),
        (["FastGen >= 99"], "failed"),
        (["fastgen[gpu]>=99"], "failed"),
        (["fastgen>=99; python_version >= '3.11'"], "failed"),
        (["fastgen~~1"], "failed"),
    ],
)
def test_f1_version_is_checked_before_import(load: Callable[..., Registry], requires: list[str], status: str) -> None:
    marker = "import builtins; builtins.foo_was_imported = True\n"
    record = foo(load(marker + hook(f"return [{SPEC}]"), requires=requires))
    assert record.status == status
    import builtins

    assert vars(builtins).pop("foo_was_imported", False) is (status == "loaded")


def test_wrong_version_names_both_and_the_way_out(load: Callable[..., Registry]) -> None:
    error = foo(load(requires=["fastgen<0.1"])).error or ""
    assert "needs fastgen <0.1" in error
    assert fastgen.__version__ in error
    assert "pip install --upgrade fastgen-foo" in error


def test_development_versions_count_as_their_release(
    load: Callable[..., Registry], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fastgen, "__version__", "0.2.0.dev3")
    assert foo(load(hook(f"return [{SPEC}]"), requires=["fastgen>=0.1"])).status == "loaded"


def test_unreadable_metadata_of_a_stranger_is_passed_over(site: FakeSite, load: Callable[..., Registry]) -> None:
    info = site.directory / "junk-1.dist-info"
    info.mkdir()
    (info / "entry_points.txt").write_bytes(b"[fastgen]\nno equals sign\n\xff\xfe")
    assert load().record("good").status == "loaded"


def test_object_entry_point(load: Callable[..., Registry]) -> None:
    source = f"{HEAD}class P:\n  @fg.hookimpl\n  def fastgen_models(self):\n    return [{SPEC}]\nit = P()\n"
    assert foo(load(source, entries={"foo": "foo_plugin:it"})).status == "loaded"


# ---- lists, strictness, names --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("variable", "value", "loaded"),
    [
        ("FASTGEN_PLUGINS", None, {"foo", "good", "llama"}),
        ("FASTGEN_PLUGINS", "", set()),
        ("FASTGEN_PLUGINS", " foo , good", {"foo", "good"}),
        ("FASTGEN_PLUGINS", "Fastgen_Foo", {"foo"}),
        ("FASTGEN_PLUGINS", "fastgen", {"llama"}),
        ("FASTGEN_DISABLE_PLUGINS", "foo", {"good", "llama"}),
        ("FASTGEN_DISABLE_PLUGINS", "fastgen-foo,good", {"llama"}),
        ("FASTGEN_DISABLE_PLUGINS", "", {"foo", "good", "llama"}),
    ],
)
def test_allow_and_block_lists(
    load: Callable[..., Registry], monkeypatch: pytest.MonkeyPatch, variable: str, value: str | None, loaded: set[str]
) -> None:
    if value is not None:
        monkeypatch.setenv(variable, value)
    records = load(hook(f"return [{SPEC}]")).plugins
    assert {r.name for r in records if r.status == "loaded"} & {"foo", "good", "llama"} == loaded
    assert {"foo", "good", "llama"} <= {r.name for r in records}


def test_blocked_wins_over_allowed(load: Callable[..., Registry], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FASTGEN_PLUGINS", "foo,good")
    monkeypatch.setenv("FASTGEN_DISABLE_PLUGINS", "foo")
    registry = load("raise RuntimeError('must not be imported')")
    assert foo(registry).status == "disabled"
    assert foo(registry).error == "disabled by FASTGEN_DISABLE_PLUGINS"


@pytest.mark.parametrize("variable", ["FASTGEN_PLUGINS", "FASTGEN_DISABLE_PLUGINS"])
def test_unknown_name_in_a_list_is_warned(
    load: Callable[..., Registry],
    monkeypatch: pytest.MonkeyPatch,
    variable: str,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv(variable, "goood")
    load(hook(f"return [{SPEC}]"))
    assert f"{variable} names 'goood', which is not installed. Did you mean 'good'" in capfd.readouterr().err


@pytest.mark.parametrize(("value", "raises"), [("1", True), ("true", True), ("0", False), ("", False)])
def test_strict_mode(load: Callable[..., Registry], monkeypatch: pytest.MonkeyPatch, value: str, raises: bool) -> None:
    monkeypatch.setenv("FASTGEN_PLUGINS_STRICT", value)
    if not raises:
        assert foo(load("1 / 0")).status == "failed"
        return
    with pytest.raises(PluginError, match=r"(?s)'foo'.*is broken: ZeroDivisionError.*Traceback"):
        load("1 / 0")


def test_strict_argument_wins_over_the_environment(site: FakeSite, monkeypatch: pytest.MonkeyPatch) -> None:
    site.add("fastgen-foo", entries={"foo": "foo_plugin"}, modules={"foo_plugin": "1 / 0"})
    monkeypatch.setenv("FASTGEN_PLUGINS_STRICT", "0")
    with pytest.raises(PluginError):
        load_registry(strict=True)


def test_strict_must_be_yes_or_no(site: FakeSite, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FASTGEN_PLUGINS_STRICT", "maybe")
    with pytest.raises(ConfigError, match="FASTGEN_PLUGINS_STRICT is 'maybe'"):
        load_registry()


def test_two_strangers_with_one_name_are_both_left_out(load: Callable[..., Registry], site: FakeSite) -> None:
    site.add("fastgen-rival", entries={"foo": "rival_plugin"}, modules={"rival_plugin": GOOD})
    records = [r for r in load(hook(f"return [{SPEC}]")).plugins if r.name == "foo"]
    assert [r.status for r in records] == ["failed", "failed"]
    assert "also used by fastgen-rival" in (records[0].error or "")
    assert "also used by fastgen-foo" in (records[1].error or "")


def test_one_name_for_two_is_settled_by_the_block_list(
    load: Callable[..., Registry], site: FakeSite, monkeypatch: pytest.MonkeyPatch
) -> None:
    site.add("fastgen-rival", entries={"foo": "rival_plugin"}, modules={"rival_plugin": GOOD})
    monkeypatch.setenv("FASTGEN_DISABLE_PLUGINS", "fastgen-rival")
    registry = load(hook(f"return [{SPEC}]"))
    assert foo(registry).distribution == "fastgen-foo"
    assert foo(registry).status == "loaded"


def test_a_stranger_cannot_take_a_built_in_name(load: Callable[..., Registry]) -> None:
    registry = load(hook(f"return [{SPEC}]"), entries={"llama": "foo_plugin"})
    assert {r.distribution: r.status for r in registry.plugins if r.name == "llama"} == {
        "fastgen": "loaded",
        "fastgen-foo": "failed",
    }
    assert registry.record("llama").distribution == "fastgen"


def test_same_plugin_installed_twice_is_harmless(
    site: FakeSite, tmp_path: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    site.add("fastgen-good", entries={"good": "good_plugin"}, modules={"good_plugin": GOOD})
    second = FakeSite(site.directory.parent / "second")
    second.add("fastgen_good", version="0.9", entries={"good": "good_plugin"})
    monkeypatch.syspath_prepend(site.directory)
    import sys

    monkeypatch.setattr(sys, "path", [*sys.path, str(second.directory)])
    assert [(r.status, r.version) for r in load_registry().plugins if r.name == "good"] == [("loaded", "1.0")]


# ---- evidence of what a plugin that is not loaded would serve ------------------------------------------------------


@pytest.mark.parametrize(
    "source",
    [
        hook(f"return [{SPEC}]"),
        hook('return [fg.ModelSpec(architectures=("FooForCausalLM",), config="x:C", build="x:b", weights="x:W")]'),
        'NAMES = ("FooForCausalLM",)\n' + hook('return [ModelSpec(NAMES, "x:C", "x:b", "x:W")]'),
    ],
)
def test_architectures_are_read_from_the_source(site: FakeSite, source: str) -> None:
    site.add("fastgen-foo", entries={"foo": "foo_package.entry"}, modules={"foo_package/entry": f"1 / 0\n{source}"})
    (point,) = (p for p in entry_points(group="fastgen") if p.name == "foo")
    assert "FooForCausalLM" in likely_architectures(point)


def test_strings_elsewhere_in_the_source_are_no_claim(site: FakeSite) -> None:
    source = '"""Like FooForCausalLM."""\nMAP = {"foo": "FooForCausalLM"}\n'
    site.add("fastgen-foo", entries={"foo": "foo_plugin"}, modules={"foo_plugin": source})
    (point,) = (p for p in entry_points(group="fastgen") if p.name == "foo")
    assert likely_architectures(point) == ()


def test_architectures_are_read_from_the_keywords(load: Callable[..., Registry]) -> None:
    registry = load("def f(:", keywords="llm,FooForCausalLM")
    with pytest.raises(PluginError, match=r"(?s)FooForCausalLM belongs to the plugin 'foo'.*SyntaxError"):
        registry.find_model("FooForCausalLM")
