"""One registry in each process, plugins registered by a call, and F2: what child processes are told."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from fastgen import api as fg
from fastgen.core.plugin import load_registry, registry
from fastgen.testing.distributions import FakeSite


def plugin(architecture: str, **spec: Any) -> SimpleNamespace:
    @fg.hookimpl
    def fastgen_models() -> list[fg.ModelSpec]:
        return [fg.ModelSpec((architecture,), "x:C", "x:b", "x:W", **spec)]

    return SimpleNamespace(fastgen_models=fastgen_models)


def test_registered_for_a_while() -> None:
    with fg.registered(plugin("FooForNothing"), name="foo") as record:
        assert record.in_process
        assert registry().find_model("FooForNothing").plugin == "foo"
        assert record in registry().plugins
    with pytest.raises(fg.UnsupportedModelError):
        registry().find_model("FooForNothing")


def test_register_and_unregister() -> None:
    fg.register(plugin("FooForCausalLM"), name="foo")
    fg.unregister("foo")
    with pytest.raises(fg.PluginError, match="no plugin 'foo' was registered"):
        fg.unregister("foo")


def test_registering_again_replaces_and_a_broken_one_does_not() -> None:
    with fg.registered(plugin("FooForCausalLM"), name="foo"):
        fg.register(plugin("BarForCausalLM"), name="foo")
        assert registry().find_model("BarForCausalLM").plugin == "foo"
        with pytest.raises(fg.PluginError, match="implements no hook"):
            fg.register(SimpleNamespace(), name="foo")
        assert registry().find_model("BarForCausalLM").plugin == "foo"


def test_registering_an_installed_plugin_is_harmless() -> None:
    import fastgen.models.llama

    before = registry().plugins
    with fg.registered(fastgen.models.llama) as record:
        assert not record.in_process
        assert registry().plugins == before
    assert registry().find_model("LlamaForCausalLM").plugin == "llama"


def test_name_of_an_installed_plugin_is_taken() -> None:
    with pytest.raises(fg.PluginError, match="'llama' belongs to the installed plugin"):
        fg.register(plugin("FooForCausalLM"), name="llama")


def test_call_obeys_the_rules_for_claims() -> None:
    with fg.registered(plugin("LlamaForCausalLM"), name="mine"):
        with pytest.raises(fg.PluginError, match=r"'llama' .* and 'mine' \(in this process\)"):
            registry().find_model("LlamaForCausalLM")
        assert registry().find_model("LlamaForCausalLM", adapter={"LlamaForCausalLM": "mine"}).plugin == "mine"
    with fg.registered(plugin("LlamaForCausalLM", overrides=("llama",)), name="mine"):
        assert registry().find_model("LlamaForCausalLM").plugin == "mine"


# ---- F2 ------------------------------------------------------------------------------------------------------------


def test_f2_fingerprint_of_equal_sets_is_equal() -> None:
    first, second = load_registry(), load_registry()
    assert first.fingerprint() == second.fingerprint()
    second.verify(first.fingerprint())
    assert any(line.startswith("llama fastgen==") for line in first.fingerprint())


def test_f2_child_with_other_plugins_refuses(site: FakeSite, add_family: Any) -> None:
    add_family("foo", "FooForCausalLM")
    parent = load_registry().fingerprint()
    with pytest.raises(fg.PluginError, match=r"only in the parent: foo fastgen-foo==1\.0"):
        load_registry(block=["foo"]).verify(parent)
    with pytest.raises(fg.PluginError, match="only here: foo"):
        load_registry().verify(line for line in parent if not line.startswith("foo "))


def test_f2_other_version_is_seen(site: FakeSite, add_family: Any) -> None:
    add_family("foo", "FooForCausalLM")
    parent = [line.replace("==1.0", "==1.1") for line in load_registry().fingerprint()]
    with pytest.raises(fg.PluginError, match=r"parent: foo fastgen-foo==1\.1; only here: foo fastgen-foo==1\.0"):
        load_registry().verify(parent)


def test_f2_in_process_plugin_is_refused_in_a_spawned_child(site: FakeSite, add_family: Any) -> None:
    """The installed family is there in the child, the one registered by a call is named and refused."""
    add_family("foo", "FooForCausalLM")
    script = """
import multiprocessing as mp
from types import SimpleNamespace
from fastgen import api as fg
from fastgen.core.plugin import registry

def child(fingerprint):
    print(registry().find_model("FooForCausalLM").plugin, flush=True)
    try:
        registry().verify(fingerprint)
    except fg.PluginError as error:
        print(error, flush=True)
    else:
        print("verified", flush=True)

if __name__ == "__main__":
    spawn = mp.get_context("spawn")
    for local in (False, True):
        if local:
            @fg.hookimpl
            def fastgen_models():
                return [fg.ModelSpec(("MineForCausalLM",), "x:C", "x:b", "x:W")]
            fg.register(SimpleNamespace(fastgen_models=fastgen_models), name="mine")
        process = spawn.Process(target=child, args=(registry().fingerprint(),))
        process.start()
        process.join()
"""
    file = site.directory / "script.py"
    file.write_text(script)
    lines = site.run(str(file)).stdout.splitlines()
    assert lines[:3] == ["foo", "verified", "foo"]
    assert "'mine' was registered by a call in the parent process" in lines[3]


# ---- once in each process ------------------------------------------------------------------------------------------


def test_a_broken_plugin_costs_one_line_in_a_process(site: FakeSite) -> None:
    site.add("fastgen-foo", entries={"foo": "foo_plugin"}, modules={"foo_plugin": "print('imported'); 1 / 0"})
    code = "from fastgen.core.plugin import registry; registry(); registry(); print(registry() is registry())"
    result = site.run("-c", code)
    assert result.stdout.split() == ["imported", "True"]
    assert len(result.stderr.splitlines()) == 1


def test_threads_share_one_registry(site: FakeSite) -> None:
    site.add("fastgen-foo", entries={"foo": "foo_plugin"}, modules={"foo_plugin": "print('imported')"})
    code = (
        "from concurrent.futures import ThreadPoolExecutor as T\nfrom fastgen.core.plugin import registry\n"
        "print(len(set(T(8).map(lambda _: id(registry()), range(8)))))"
    )
    assert site.run("-c", code).stdout.split() == ["imported", "1"]


def test_plugin_may_not_ask_for_the_registry_while_it_loads(site: FakeSite) -> None:
    source = "from fastgen import api as fg\nfg.register(object())"
    site.add("fastgen-foo", entries={"foo": "foo_plugin"}, modules={"foo_plugin": source})
    code = "from fastgen.core.plugin import registry; print(registry().record('foo').error)"
    assert "while it was being loaded" in site.run("-c", code).stdout
