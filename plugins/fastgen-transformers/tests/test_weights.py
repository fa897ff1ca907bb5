"""A checkpoint fills the model exactly, or is refused with the names, before anything is read."""

from __future__ import annotations

import json
import random
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from fastgen import CheckpointError

EXPERT = "model.layers.1.mlp.experts.2.down_proj.weight"
NORM = "model.layers.3.input_layernorm.weight"


@pytest.fixture
def copy(checkpoint, tmp_path):
    """A copy of a checkpoint with its tensors, and config, changed by a function."""

    def do(model_type, change=lambda tensors: None, **config):
        directory = tmp_path / "copy"
        shutil.copytree(checkpoint(model_type), directory)
        tensors = load_file(directory / "model.safetensors")
        change(tensors)
        save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
        raw = json.loads((directory / "config.json").read_text())
        (directory / "config.json").write_text(json.dumps({**raw, **config}))
        return directory

    return do


def refused(load, directory) -> str:
    with pytest.raises(CheckpointError) as caught:
        load(directory)
    return str(caught.value)


def test_experts_lie_one_by_one_in_the_file_and_stacked_in_the_model(checkpoint, load):
    """A control for the tests below: files and model really differ."""
    directory = checkpoint("olmoe")
    assert EXPERT in load_file(directory / "model.safetensors")
    with load(directory) as engine:
        ours = engine._model.hosted.model.state_dict()
    assert EXPERT not in ours
    reference = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).state_dict()
    assert ours.keys() == reference.keys()
    assert all(torch.equal(ours[name], reference[name]) for name in reference)


def test_shuffled_shards_of_one_tensor(copy, load):
    directory = copy("olmoe")
    tensors = load_file(directory / "model.safetensors")
    names = list(tensors)
    random.Random(0).shuffle(names)
    files = {name: f"model-{n + 1:05}-of-{len(names):05}.safetensors" for n, name in enumerate(names)}
    for name, file in files.items():
        save_file({name: tensors[name]}, directory / file, metadata={"format": "pt"})
    (directory / "model.safetensors").unlink()
    (directory / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": files}))
    reference = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).state_dict()
    with load(directory) as engine:
        ours = engine._model.hosted.model.state_dict()
    assert all(torch.equal(ours[name], reference[name]) for name in reference)


def test_a_missing_tensor_is_named(copy, load):
    assert f"no tensor fills: {NORM}." in refused(load, copy("olmoe", lambda tensors: tensors.pop(NORM)))


def test_an_extra_tensor_is_named(copy, load):
    def add(tensors):
        tensors["model.layers.3.extra.weight"] = torch.ones(3)

    assert "nothing in the model takes: model.layers.3.extra.weight." in refused(load, copy("olmoe", add))


def test_one_missing_expert_is_noticed(copy, load):
    told = refused(load, copy("olmoe", lambda tensors: tensors.pop(EXPERT)))
    assert "shapes that do not fit" in told
    assert "model.layers.1.mlp.experts.0.down_proj.weight" in told


def test_a_wrong_shape_is_named(copy, load):
    def cut(tensors):
        tensors[NORM] = tensors[NORM][:-1].clone()

    assert f"{NORM} gives [63], the model wants [64]" in refused(load, copy("olmoe", cut))


def test_recomputed_buffers_in_old_files_are_left_out(copy, load, answer, checkpoint):
    def add(tensors):
        tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.full((8,), float("nan"))

    with load(copy("olmoe", add)) as changed, load(checkpoint("olmoe")) as plain:
        assert answer(changed, [[5, 6, 7]]) == answer(plain, [[5, 6, 7]])


@pytest.mark.parametrize("same", [True, False])
def test_tied_by_the_config_and_both_in_the_file(copy, load, answer, caplog, same):
    """Equal: one is read. Different: both are used, as transformers does."""

    def add(tensors):
        table = tensors["model.embed_tokens.weight"]
        tensors["lm_head.weight"] = table.clone() if same else table.flip(0).contiguous()

    directory = copy("cohere2", add)
    assert json.loads((directory / "config.json").read_text())["tie_word_embeddings"]
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    expected = model.generate(torch.tensor([[5, 6, 7]]), max_new_tokens=8, do_sample=False)[0, 3:].tolist()
    with load(directory) as engine:
        assert answer(engine, [[5, 6, 7]], tokens=8) == [expected]
        parameters = dict(engine._model.hosted.model.named_parameters())
    assert ("lm_head.weight" in parameters) is not same
    assert ("different lm_head.weight" in caplog.text) is not same
