"""Loading, encoding, BOS, threads."""

from __future__ import annotations

import json
import logging
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from fastgen.errors import CheckpointError, ConfigError, InvalidRequestError
from fastgen.testing.tokenizers import build_byte_tokenizer, byte_tokenizer, save_tokenizer
from fastgen.text import Tokenizer


def test_a18_num_ids_counts_added_tokens_and_holes(make: Callable[[str], Tokenizer], plain: Tokenizer) -> None:
    assert plain.num_ids == 259
    assert make("llama2").num_ids == 291


def test_a19_end_and_begin_tokens(plain: Tokenizer, make: Callable[[str], Tokenizer]) -> None:
    assert (plain.eos_token_ids, plain.bos_token_id) == (frozenset({257}), 256)
    assert (make("llama2").eos_token_ids, make("llama2").bos_token_id) == (frozenset({2}), 1)


def test_no_end_token(tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(save_tokenizer(build_byte_tokenizer(), tmp_path))
    assert (tokenizer.eos_token_ids, tokenizer.bos_token_id) == (frozenset(), None)


@pytest.mark.real_model
def test_real_tokenizer_equals_transformers(real_model: Path) -> None:
    ours, theirs = Tokenizer.load(real_model), AutoTokenizer.from_pretrained(real_model)
    for text in ["", "Hello, world", " two  spaces\n", "é😀한", "<|im_start|>user"]:
        assert ours.encode(text) == theirs.encode(text)
    assert ours.eos_token_ids == {theirs.eos_token_id}
    assert ours.num_ids == len(theirs)


def test_b8_an_empty_text_has_bos_only_if_the_tokenizer_adds_one(plain: Tokenizer, with_bos: Path) -> None:
    assert plain.encode("") == []
    assert Tokenizer.load(with_bos).encode("") == [256]


def test_b6_who_adds_bos(with_bos: Path) -> None:
    tokenizer = Tokenizer.load(with_bos)
    assert tokenizer.encode("a") == [256, 97]
    assert tokenizer.encode("a", add_special_tokens=False) == [97]
    ids = tokenizer.encode_chat([{"role": "user", "content": "hi"}])
    assert ids == AutoTokenizer.from_pretrained(with_bos).apply_chat_template(
        [{"role": "user", "content": "hi"}], add_generation_prompt=True, return_dict=False
    )
    assert ids.count(256) == 1
    assert tokenizer.encode_chat([{"role": "user", "content": "hi"}], add_special_tokens=True) == [256, *ids]


def test_b6_text_that_begins_with_bos_is_kept_and_warned_of_once(
    with_bos: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tokenizer = Tokenizer.load(with_bos)
    with caplog.at_level(logging.WARNING, "fastgen"):
        assert tokenizer.encode("<bos>a", add_special_tokens=False) == [256, 97]
        assert not caplog.records
        assert tokenizer.encode("<bos>a") == [256, 256, 97]
        assert tokenizer.encode("<bos>b") == [256, 256, 98]
    assert [record.message.count("the model sees two") for record in caplog.records] == [1]


@pytest.mark.parametrize(
    ("text", "words"), [("a\ud800b", "character 1"), (5, "string"), (None, "string"), (b"x", "bytes")]
)
def test_what_is_no_text_is_refused(plain: Tokenizer, text: object, words: str) -> None:
    with pytest.raises(InvalidRequestError, match=words) as caught:
        plain.encode(text)  # type: ignore[arg-type]
    assert caught.value.field == "prompt"


def test_a_directory_without_tokenizer(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(CheckpointError, match="holds no tokenizer") as caught:
        Tokenizer.load(tmp_path)
    assert str(tmp_path) in str(caught.value)


@pytest.mark.parametrize("content", ["{ broken", "{}", ""])
def test_a_broken_tokenizer_file(tmp_path: Path, content: str) -> None:
    (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(CheckpointError, match="cannot be loaded") as caught:
        Tokenizer.load(tmp_path)
    assert str(tmp_path) in str(caught.value)


@pytest.mark.parametrize("model_type", ["llama", "gpt2", "qwen2", "mistral", "deepseek_v3", "unheard_of", None])
@pytest.mark.parametrize("kind", ["PreTrainedTokenizerFast", "GPT2Tokenizer", "LlamaTokenizerFast", "Unheard", None])
def test_the_class_is_the_one_transformers_chooses(tmp_path: Path, kind: str | None, model_type: str | None) -> None:
    byte_tokenizer(tmp_path)
    own = json.loads((tmp_path / "tokenizer_config.json").read_text()) | {"tokenizer_class": kind}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({k: v for k, v in own.items() if v is not None}))
    model = {"model_type": model_type, "vocab_size": 259}
    (tmp_path / "config.json").write_text(json.dumps({k: v for k, v in model.items() if v is not None}))
    try:
        theirs = AutoTokenizer.from_pretrained(tmp_path)
    except Exception:  # it cannot: nor can we
        with pytest.raises(CheckpointError):
            Tokenizer.load(tmp_path)
        return
    ours = Tokenizer.load(tmp_path)
    assert type(ours._hf) is type(theirs)
    assert ours.encode("Once upon é") == theirs.encode("Once upon é")


def test_a_tokenizer_brings_in_no_modelling_code(tmp_path: Path) -> None:
    """transformers' `AutoTokenizer` makes the model's config, whose class imports a good part of it and of torch."""
    byte_tokenizer(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    code = (
        "import sys; from pathlib import Path; from fastgen.text import Tokenizer\n"
        "from transformers import AutoTokenizer\n"
        "def there(): return 'transformers.models.llama.configuration_llama' in sys.modules\n"
        "Tokenizer.load(Path(sys.argv[1])); ours = there()\n"
        "AutoTokenizer.from_pretrained(sys.argv[1]); print(ours, there())"
    )
    run = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, check=True)
    assert run.stdout.split() == ["False", "True"], "ours; and theirs, the control"


@pytest.fixture
def remote_code(tmp_path: Path) -> Path:
    """A tokenizer that is code of the checkpoint's own; the code leaves a file behind when it runs."""
    byte_tokenizer(tmp_path)
    code = "import pathlib\npathlib.Path(__file__).with_name('ran').touch()\n"
    mark = tmp_path / "ran"
    code = f"import pathlib\npathlib.Path({str(mark)!r}).touch()\n"
    code += "from transformers import PreTrainedTokenizerFast\nclass Own(PreTrainedTokenizerFast): pass\n"
    (tmp_path / "own.py").write_text(code)
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    config |= {"tokenizer_class": "Own", "auto_map": {"AutoTokenizer": [None, "own.Own"]}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    (tmp_path / "config.json").write_text('{"model_type": "unheard_of"}')
    return tmp_path


def test_remote_code_runs_only_when_allowed(
    remote_code: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ConfigError, match="trust_remote_code=True"):
        Tokenizer.load(remote_code)
    assert not (remote_code / "ran").exists()
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path_factory.mktemp("modules")))
    assert Tokenizer.load(remote_code, trust_remote_code=True).encode("a") == [97]
    assert (remote_code / "ran").exists()


def run_threads(work: Callable[[int], None], count: int = 8) -> list[BaseException]:
    errors: list[BaseException] = []

    def guarded(index: int) -> None:
        try:
            work(index)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=guarded, args=(i,)) for i in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return errors


def test_many_threads_at_once(tmp_path: Path) -> None:
    """Truncation and padding stored in the file must neither apply nor be switched off while another thread reads."""
    tokenizer = build_byte_tokenizer(add_bos=True)
    tokenizer.enable_truncation(10)
    tokenizer.enable_padding(length=50)
    shared = Tokenizer.load(
        save_tokenizer(tokenizer, tmp_path, chat_template="{{ messages[0].content }}", pad_token="<pad>")
    )
    text = "héllo 😀 " * 300

    def work(index: int) -> None:
        for turn in range(20):
            special = bool((index + turn) % 2)
            ids = shared.encode(text, add_special_tokens=special)
            assert ids == [256] * special + list(text.encode())
            assert shared.decode(ids) == text
            assert shared.render_chat([{"role": "user", "content": f"{index} {turn}"}]) == f"{index} {turn}"

    assert run_threads(work) == []


def test_many_threads_with_a_tokenizer_in_plain_python() -> None:
    from transformers import ByT5Tokenizer

    shared = Tokenizer(ByT5Tokenizer())

    def work(index: int) -> None:
        text = f"héllo {index} " * 10
        assert shared.decode(shared.encode(text)) == text

    assert run_threads(work) == []


def test_byte_tokenizer_for_tests(tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(byte_tokenizer(tmp_path, merges=[(b"h", b"e"), (b"he", b"y")]))
    assert tokenizer.encode("hey he 😀") == [257, 32, 256, 32, *"😀".encode()]
    assert tokenizer.eos_token_ids == {259}
    shutil.rmtree(tmp_path)
    assert tokenizer.decode([257, 258]) == "hey"
