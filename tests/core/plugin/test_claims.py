"""Who serves an architecture when several claim it, when a claimant is broken, and when nobody does."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from fastgen.core.plugin import load_registry
from fastgen.errors import PluginError, UnsupportedModelError
from fastgen.testing.distributions import FakeSite

ARCHITECTURE = "FooForCausalLM"
Add = Callable[..., None]


@pytest.fixture
def rivals(add_family: Add) -> None:
    """Two plugins that claim one architecture, and a third that claims another."""
    add_family("one", ARCHITECTURE)
    add_family("two", ARCHITECTURE)
    add_family("other", "BarForCausalLM")


@pytest.mark.usefixtures("rivals")
def test_f1_duplicate_claim_is_an_error_only_where_it_matters() -> None:
    registry = load_registry()
    assert registry.find_model("BarForCausalLM").plugin == "other"
    with pytest.raises(PluginError, match=r"'one' \(fastgen-one 1.0\) and 'two' \(fastgen-two 1.0\)") as caught:
        registry.find_model(ARCHITECTURE)
    assert "adapter={'FooForCausalLM': 'one'}" in str(caught.value)
    assert "FASTGEN_DISABLE_PLUGINS" in str(caught.value)
    notes = {row.plugin.name: row.note for row in registry.model_rows() if row.architecture == ARCHITECTURE}
    assert notes == {"one": "clashes with two", "two": "clashes with one"}


@pytest.mark.usefixtures("rivals")
@pytest.mark.parametrize(
    ("pins", "winner"),
    [
        ({ARCHITECTURE: "one"}, "one"),
        ({ARCHITECTURE: "two"}, "two"),
        ({ARCHITECTURE: "fastgen-two"}, "two"),
        ({"one": "two"}, "two"),
        ({ARCHITECTURE: "two", "BarForCausalLM": "other"}, "two"),
    ],
)
def test_pin_settles_it(pins: dict[str, str], winner: str) -> None:
    assert load_registry().find_model(ARCHITECTURE, adapter=pins).plugin == winner


@pytest.mark.usefixtures("rivals")
@pytest.mark.parametrize(
    ("pins", "message"),
    [
        ({ARCHITECTURE: "tow"}, "'tow', but no such plugin is installed. Did you mean 'two'"),
        ({ARCHITECTURE: "other"}, "'other', which does not serve it; one and two"),
        ({"FooForCasualLM": "two"}, "no plugin serves and none is called. Did you mean 'FooForCausalLM'"),
    ],
)
def test_pin_that_means_nothing_is_refused(pins: dict[str, str], message: str) -> None:
    with pytest.raises(PluginError, match=message):
        load_registry().find_model(ARCHITECTURE, adapter=pins)


@pytest.mark.parametrize("first", ["one", "two"])
@pytest.mark.parametrize("target", ["{other}", "fastgen-{other}"])
def test_override_wins_whatever_the_order(add_family: Add, first: str, target: str) -> None:
    other = {"one": "two", "two": "one"}[first]
    add_family(first, ARCHITECTURE, f", overrides=('{target.format(other=other)}',)")
    add_family(other, ARCHITECTURE)
    registry = load_registry()
    assert registry.find_model(ARCHITECTURE).plugin == first
    assert {row.plugin.name: row.note for row in registry.model_rows() if row.architecture == ARCHITECTURE} == {
        first: "",
        other: f"overridden by {first}",
    }


def test_override_of_a_built_in(add_family: Add) -> None:
    add_family("better", "LlamaForCausalLM", ", overrides=('llama',)")
    registry = load_registry()
    assert registry.find_model("LlamaForCausalLM").plugin == "better"
    assert registry.find_model("LlamaForCausalLM", adapter={"LlamaForCausalLM": "llama"}).plugin == "llama"


def test_claiming_a_built_in_without_override_is_an_error(add_family: Add) -> None:
    add_family("better", "LlamaForCausalLM")
    with pytest.raises(PluginError, match=r"'better' \(fastgen-better 1.0\) and 'llama' \(fastgen "):
        load_registry().find_model("LlamaForCausalLM")


def test_two_overriders_clash_and_mutual_ones_too(add_family: Add) -> None:
    add_family("one", "LlamaForCausalLM", ", overrides=('llama',)")
    add_family("two", "LlamaForCausalLM", ", overrides=('llama',)")
    add_family("yin", ARCHITECTURE, ", overrides=('yang',)")
    add_family("yang", ARCHITECTURE, ", overrides=('yin',)")
    registry = load_registry()
    with pytest.raises(PluginError, match=r"'one' .* and 'two'"):
        registry.find_model("LlamaForCausalLM")
    with pytest.raises(PluginError, match=r"'yang' .* and 'yin'"):
        registry.find_model(ARCHITECTURE)


# ---- broken claimants ----------------------------------------------------------------------------------------------


def broken(architecture: str, arguments: str = "") -> str:
    return f"""
        from fastgen import api as fg
        import missing_dependency

        @fg.hookimpl
        def fastgen_models():
            return [fg.ModelSpec(("{architecture}",), "x:C", "x:b", "x:W"{arguments})]
    """


def test_f1_broken_owner_is_a_hard_error_with_its_traceback(site: FakeSite) -> None:
    site.add("fastgen-foo", entries={"foo": "foo_plugin"}, modules={"foo_plugin": broken(ARCHITECTURE)})
    with pytest.raises(PluginError) as caught:
        load_registry().find_model(ARCHITECTURE)
    first, *rest = str(caught.value).splitlines()
    assert first.startswith("FooForCausalLM belongs to the plugin 'foo' (fastgen-foo 1.0), which is broken: Module")
    assert rest[0] == "Traceback (most recent call last):"
    assert "import missing_dependency" in "\n".join(rest)


def test_f1_built_in_does_not_silently_replace_a_broken_plugin(site: FakeSite) -> None:
    source = broken("LlamaForCausalLM", ", overrides=('llama',)")
    site.add("fastgen-foo", entries={"foo": "foo_plugin"}, modules={"foo_plugin": source})
    registry = load_registry()
    with pytest.raises(PluginError, match=r"(?s)belongs to the plugin 'foo'.*set FASTGEN_DISABLE_PLUGINS=foo"):
        registry.find_model("LlamaForCausalLM")
    assert registry.find_model("LlamaForCausalLM", adapter={"LlamaForCausalLM": "llama"}).plugin == "llama"
    (note,) = (row.note for row in registry.model_rows() if row.architecture == "LlamaForCausalLM")
    assert note == "blocked by the broken plugin foo"


def test_f1_broken_plugin_does_not_touch_other_models(site: FakeSite) -> None:
    site.add("fastgen-foo", entries={"foo": "foo_plugin"}, modules={"foo_plugin": broken(ARCHITECTURE)})
    assert load_registry().find_model("LlamaForCausalLM").plugin == "llama"


def test_a_broken_plugin_that_is_overridden_does_not_matter(site: FakeSite, add_family: Add) -> None:
    site.add("fastgen-foo", entries={"foo": "foo_plugin"}, modules={"foo_plugin": broken(ARCHITECTURE)})
    add_family("new", ARCHITECTURE, ", overrides=('foo',)")
    assert load_registry().find_model(ARCHITECTURE).plugin == "new"


def test_pinning_a_broken_plugin_says_why_it_is_broken(site: FakeSite) -> None:
    site.add("fastgen-foo", entries={"foo": "foo_plugin"}, modules={"foo_plugin": "1 / 0"})
    with pytest.raises(PluginError, match="broken: ZeroDivisionError"):
        load_registry().find_model("LlamaForCausalLM", adapter={"LlamaForCausalLM": "foo"})


# ---- nobody --------------------------------------------------------------------------------------------------------


def test_unsupported_names_near_matches_and_the_way_out(site: FakeSite) -> None:
    site.add("fastgen-secret", entries={"secret": "secret"}, modules={"secret": "1 / 0"})
    with pytest.raises(UnsupportedModelError) as caught:
        load_registry().find_model(["LlamaForCausalML"])
    text = str(caught.value)
    assert "no plugin for 'LlamaForCausalML'. Did you mean 'LlamaForCausalLM'" in text
    assert "pip install fastgen-FAMILY" in text
    assert "docs/AddingAModel.md" in text
    assert "'secret' (fastgen-secret 1.0) is broken and may be the one: ZeroDivisionError" in text


def test_unsupported_names_the_plugin_that_is_switched_off() -> None:
    with pytest.raises(
        UnsupportedModelError, match=r"'llama' .* serves it but is off: not in the list FASTGEN_PLUGINS"
    ):
        load_registry(allow=()).find_model("LlamaForCausalLM")


def test_no_architecture_at_all() -> None:
    with pytest.raises(UnsupportedModelError, match="names no architecture"):
        load_registry().find_model([])


def test_the_first_claimed_architecture_wins(add_family: Add) -> None:
    add_family("foo", ARCHITECTURE)
    registry = load_registry()
    assert registry.find_model([ARCHITECTURE, "LlamaForCausalLM"]).plugin == "foo"
    assert registry.find_model(["LlamaForCausalLM", ARCHITECTURE]).plugin == "llama"
    assert registry.find_model(["Nobody", ARCHITECTURE]).plugin == "foo"


# ---- fallbacks -----------------------------------------------------------------------------------------------------


def test_fallback_serves_only_what_nobody_claims(
    site: FakeSite, add_family: Add, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FASTGEN_DISABLE_PLUGINS", "fastgen-transformers")  # a fallback too
    add_family("rest", "*ForCausalLM", ", fallback=True")
    site.add("fastgen-foo", entries={"foo": "foo_plugin"}, modules={"foo_plugin": broken(ARCHITECTURE)})
    registry = load_registry()
    assert registry.find_model("StrangeForCausalLM").plugin == "rest"
    assert registry.find_model("LlamaForCausalLM").plugin == "llama"
    assert registry.find_model("LlamaForCausalLM", adapter={"LlamaForCausalLM": "rest"}).plugin == "rest"
    with pytest.raises(PluginError, match="belongs to the plugin 'foo'"):
        registry.find_model(ARCHITECTURE)
    with pytest.raises(UnsupportedModelError):
        registry.find_model("StrangeForImages")
    assert registry.model_rows()[-1].note == "fallback"


# ---- the other kinds -----------------------------------------------------------------------------------------------

FORMATS = """
    from fastgen import api as fg

    @fg.hookimpl
    def fastgen_checkpoint_formats():
        return [fg.CheckpointFormatSpec("{name}", {suffixes}, "x:convert"{more})]

    @fg.hookimpl
    def fastgen_model_sources():
        return [fg.ModelSourceSpec("{name}", "{name}://", "x:fetch")]

    @fg.hookimpl
    def fastgen_logits_processors():
        return [fg.LogitsProcessorSpec("shared", "x:make")]

    @fg.hookimpl
    def fastgen_kernels():
        return [fg.KernelSpec("linear", "shared", "x:kernel"{more})]
"""


def add_formats(site: FakeSite, name: str, suffixes: str, more: str = "") -> None:
    source = FORMATS.format(name=name, suffixes=suffixes, more=more)
    site.add(f"fastgen-{name}", entries={name: f"{name}_plugin"}, modules={f"{name}_plugin": source})


def test_formats_and_sources_are_found_by_the_longest_fit(site: FakeSite) -> None:
    add_formats(site, "aaa", "('.bin2',)")
    add_formats(site, "bbb", "('.packed.bin2', '.BBB')")
    registry = load_registry()
    names = {
        file: getattr(registry.find_format(file), "name", None) for file in ("m.bin2", "/x/M.Packed.Bin2", "m.bbb")
    }
    assert names == {"m.bin2": "aaa", "/x/M.Packed.Bin2": "bbb", "m.bbb": "bbb"}
    assert registry.find_format("model.safetensors") is None
    assert getattr(registry.find_source("bbb://bucket/model"), "name", None) == "bbb"
    assert registry.find_source("org/model") is None


def test_other_kinds_clash_when_asked_for(site: FakeSite) -> None:
    add_formats(site, "aaa", "('.same',)")
    add_formats(site, "bbb", "('.same',)")
    registry = load_registry()
    with pytest.raises(PluginError, match=r"checkpoint format '.same' is claimed by the plugins 'aaa'"):
        registry.find_format("m.same")
    with pytest.raises(PluginError, match="logits processor 'shared'"):
        registry.find_logits_processor("shared")
    assert registry.find_logits_processor("unknown") is None
    with pytest.raises(PluginError, match="kernel 'linear/shared'"):
        _ = registry.kernels


def test_other_kinds_can_override(site: FakeSite) -> None:
    add_formats(site, "aaa", "('.same',)")
    add_formats(site, "bbb", "('.same',)", ", overrides=('aaa',)")
    registry = load_registry()
    assert getattr(registry.find_format("m.same"), "plugin", None) == "bbb"
    assert [spec.plugin for spec in registry.kernels if spec.name == "shared"] == ["bbb"]
