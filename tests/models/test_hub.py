"""Models of the Hugging Face hub, from a local server that answers as the hub does."""

import hashlib
import json
import logging
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import jax
import numpy as np
import pytest

import jrnn
from jrnn.cli import main
from jrnn.errors import FormatError
from jrnn.models import hub as hub_models

NAME = "someone/tiny-mamba"
COMMITS = {"main": "a" * 40, "old": "b" * 40}
CONFIG = {"model_type": "mamba", "vocab_size": 16, "hidden_size": 8, "num_hidden_layers": 1}


class Hub(ThreadingHTTPServer):
    """Holds the files of each commit of one model, and what was asked for."""

    def __init__(self, files):
        super().__init__(("127.0.0.1", 0), _Handler)
        self.files = files
        self.asked = []


class _Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        path = self.path.split("?")[0].strip("/")
        parts = path.split("/")
        if path.startswith(f"api/models/{NAME}"):
            self._describe(parts[4:])
        elif path.startswith(f"{NAME}/resolve/"):
            self._file(parts[3], parts[4])
        else:
            self._answer(404, b"{}", {"X-Error-Code": "RepoNotFound"})

    do_HEAD = do_GET

    def _describe(self, rest):
        kind, revision = rest if rest else ("revision", "main")
        commit = COMMITS.get(revision, revision)
        if commit not in self.server.files:
            self._answer(404, b"{}", {"X-Error-Code": "RevisionNotFound"})
        elif kind == "tree":
            entries = []
            for name, content in self.server.files[commit].items():
                digest = hashlib.sha1(content).hexdigest()
                entries.append({"type": "file", "path": name, "size": len(content), "oid": digest})
            self._answer(200, json.dumps(entries).encode())
        else:
            described = {"id": NAME, "sha": commit, "siblings": [], "private": False}
            self._answer(200, json.dumps(described).encode())

    def _file(self, commit, name):
        content = self.server.files[commit].get(name)
        if content is None:
            self._answer(404, b"", {"X-Error-Code": "EntryNotFound"})
            return
        if self.command == "GET":
            self.server.asked.append(name)
        etag = f'"{hashlib.sha1(content).hexdigest()}"'
        self._answer(200, content, {"ETag": etag, "X-Repo-Commit": commit})

    def _answer(self, status, content, headers=()):
        self.send_response(status)
        for name, value in dict(headers).items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(content)

    def log_message(self, *ignored):
        """Prints nothing."""


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """The files of two models, which differ in their parameters."""
    files = {}
    for seed, commit in enumerate(COMMITS.values()):
        folder = tmp_path_factory.mktemp("model")
        jrnn.models.create(CONFIG, jax.random.key(seed)).save(folder)
        files[commit] = {path.name: path.read_bytes() for path in folder.iterdir()}
        files[commit]["pytorch_model.bin"] = b"not asked for"
        files[commit]["README.md"] = b"not asked for"
    return files


@pytest.fixture
def hub(saved, tmp_path, monkeypatch):
    """The server, at which huggingface_hub looks, with an empty cache."""
    constants = pytest.importorskip("huggingface_hub.constants")
    server = Hub(saved)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    address = f"http://127.0.0.1:{server.server_port}"
    files = constants.HUGGINGFACE_CO_URL_TEMPLATE.removeprefix(constants.ENDPOINT)
    monkeypatch.setattr(constants, "ENDPOINT", address)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", address + files)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_PROGRESS_BARS", True)
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


def _parameters(model):
    return {name: np.asarray(value) for name, value in model.params.items()}


def test_a_model_is_downloaded_once_after_its_size_was_said(hub, caplog):
    caplog.set_level(logging.WARNING, "jrnn.models")
    model = jrnn.models.load(NAME)
    assert sorted(hub.asked) == ["config.json", "model.safetensors"]
    assert f"{NAME}: downloading 2 files, 0.0 MB" in caplog.text
    caplog.clear()
    again = jrnn.models.load(NAME)
    assert len(hub.asked) == 2 and caplog.text == ""
    for name, value in _parameters(model).items():
        np.testing.assert_array_equal(value, _parameters(again)[name])


def test_a_revision_is_another_model(hub):
    newest = _parameters(jrnn.models.load(NAME))
    old = _parameters(jrnn.models.load(NAME, revision="old"))
    by_name = _parameters(jrnn.models.load(f"{NAME}@{COMMITS['old']}"))
    assert any((newest[name] != old[name]).any() for name in old)
    for name, value in old.items():
        np.testing.assert_array_equal(value, by_name[name])


def test_without_a_network_the_cache_is_read(hub, monkeypatch):
    jrnn.models.load(NAME)
    constants = pytest.importorskip("huggingface_hub.constants")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert jrnn.models.load(NAME).family.name == "mamba"
    with pytest.raises(FormatError, match=r"someone/other: .* the hub cannot be read"):
        jrnn.models.load("someone/other")


@pytest.mark.parametrize("name", ["someone/other", f"{NAME}@missing"])
def test_what_the_hub_does_not_have(hub, name):
    with pytest.raises(FormatError, match=f"{name}: .*the hub cannot be read: 404"):
        jrnn.models.load(name)


def test_a_model_without_safetensors_is_downloaded_as_torchs(hub, saved, monkeypatch):
    files = dict(saved[COMMITS["main"]])
    del files["model.safetensors"]
    empty = {"config.json": files["config.json"]}
    monkeypatch.setattr(hub, "files", {COMMITS["main"]: files, COMMITS["old"]: empty})
    folder = hub_models.folder_of(NAME)
    assert {path.name for path in folder.iterdir()} == {"config.json", "pytorch_model.bin"}
    with pytest.raises(FormatError, match="neither"):
        hub_models.folder_of(f"{NAME}@old")


def test_a_folder_goes_before_the_hub_and_has_no_revision(hub, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    jrnn.models.create(CONFIG, jax.random.key(0)).save(tmp_path / NAME)
    jrnn.models.load(NAME)
    assert hub.asked == []
    with pytest.raises(FormatError, match="a folder has no revision, 'old' was given"):
        jrnn.models.load(NAME, revision="old")


def test_the_command_line_samples_from_the_hub(hub, capsys):
    assert main(["sample", NAME, "--prompt", "3", "--length", "2"]) == 0
    assert len(capsys.readouterr().out.split()) == 3
    assert main(["sample", "someone/other", "--prompt", "3"]) == 2
    assert "the hub cannot be read: 404" in capsys.readouterr().err


def test_without_huggingface_hub_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(FormatError, match=r"needs the extra 'hub': pip install 'jrnn\[hub\]'"):
        jrnn.models.load("someone/tiny-mamba")
