"""TOML into dataclasses: what is wrong is named, with where it stands and what was meant."""

import tomllib

import pytest

from jrnn.errors import ConfigError
from jrnn.train import Config, load_config
from jrnn.train.toml_codec import decode, encode, override, split_values


def test_defaults_need_no_table():
    assert decode(Config, {}, "c.toml") == Config()


@pytest.mark.parametrize(
    ("tables", "message"),
    [
        ({"model": {"hiden": 3}}, "c.toml: unknown key 'model.hiden'; did you mean 'hidden'?"),
        ({"task": "character"}, "c.toml: there is no task 'character'; did you mean 'characters'?"),
        ({"task": 3}, "there is no task 3; known are characters"),
        (
            {"model": {"kind": "x"}},
            "c.toml: model.kind: task 'characters' has no models of kind 'x'; known are cells",
        ),
        ({"hidden": 3}, "c.toml: unknown key 'hidden'; did you mean 'model.hidden'?"),
        ({"modle": {}}, "c.toml: unknown key 'modle'; did you mean 'model'?"),
        ({"train": {"zzz": 1}}, "unknown key 'train.zzz'; known are steps, steps_per_call"),
        ({"model": {"hidden": 0}}, "c.toml: model.hidden must be at least 1, is 0"),
        ({"model": {"hidden": "8"}}, "c.toml: model.hidden must be an integer, is '8'"),
        ({"model": {"hidden": True}}, "model.hidden must be an integer, is True"),
        ({"model": {"hidden": 8.0}}, "model.hidden must be an integer, is 8.0"),
        ({"model": 3}, "model must be a table [model], is 3"),
        ({"gradient": {"check": 1}}, "gradient.check must be true or false, is 1"),
        (
            {"gradient": {"source": "nett"}},
            "must be 'jax' or 'net', is 'nett'; did you mean 'net'?",
        ),
        ({"optimizer": {"options": 3}}, "optimizer.options must be a table, is 3"),
        ({"data": {"source": "file"}}, 'data.source = "file" needs data.path'),
        ({"data": {"validation": 1.0}}, "data.validation must lie between 0 and 1, is 1.0"),
        ({"sample": {"prompt": ""}}, "sample.prompt must hold at least one character"),
    ],
)
def test_a_mistake_is_named(tables, message):
    with pytest.raises(ConfigError) as e:
        decode(Config, tables, "c.toml")
    assert message in str(e.value)


def test_integers_are_numbers_and_a_path_is_a_source():
    config = decode(
        Config, {"optimizer": {"learning_rate": 1}, "data": {"path": "a.txt"}}, "c.toml"
    )
    assert config.optimizer.learning_rate == 1.0
    assert config.data.source == "file"


def test_what_is_written_is_read_back():
    tables = {
        "seed": 7,
        "data": {"path": 'a "b"\\c\n.txt'},
        "sample": {"prompt": "naïve\t\x7f😀"},
        "optimizer": {
            "name": "adamw",
            "options": {"weight_decay": 1e-5, "nesterov": True, "b": [1, 2]},
        },
    }
    config = decode(Config, tables, "c.toml")
    for one in (config, Config()):
        assert decode(Config, tomllib.loads(encode(one)), "again") == one


def test_overrides_are_toml_values_or_else_strings():
    changed = override(
        {"a": {"b": 1}}, ["a.b=2.5", "a.c=true", "d=[1, 2]", "e=some text", 'f="x=y"', "g.h.i=1"]
    )
    expected = {
        "a": {"b": 2.5, "c": True},
        "d": [1, 2],
        "e": "some text",
        "f": "x=y",
        "g": {"h": {"i": 1}},
    }
    assert changed == expected


@pytest.mark.parametrize(
    ("assignment", "message"),
    [
        ("train.steps", "must be written KEY=VALUE"),
        ("=3", "must be written"),
        ("seed.x=3", "'seed' is a value, not a table"),
    ],
)
def test_an_override_that_is_none(assignment, message):
    with pytest.raises(ConfigError, match=message):
        override({"seed": 1}, [assignment])


@pytest.mark.parametrize(
    ("text", "value"),
    [
        (".001", 0.001),
        ("-1.", -1.0),
        ("1.e-3", 0.001),
        ("1e1", 10),
        ("True", True),
        ("[.5, 1., False]", [0.5, 1.0, False]),
        ("{b1 = .9, note = '1., True'}", {"b1": 0.9, "note": "1., True"}),
        ("'True'", "True"),
        ("1.2.3", "1.2.3"),
        ("x.5", "x.5"),
        ("True.txt", "True.txt"),
        ("it's", "it's"),
    ],
)
def test_numbers_and_booleans_may_be_written_as_in_python(text, value):
    changed = override({}, [f"a.b={text}"])["a"]["b"]
    assert changed == value and type(changed) is type(value)


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("1, 2", ["1", "2"]),
        ("[1, 2],[]", ["[1, 2]", "[]"]),
        ('{a = 1, b = "x, }"},{a = 2}', ['{a = 1, b = "x, }"}', "{a = 2}"]),
        ("[[1, 2], ['a, ]']],c", ["[[1, 2], ['a, ]']]", "c"]),
        (r'"a, \", b",c', [r'"a, \", b"', "c"]),
        ('"""a, "b", c""",d', ['"""a, "b", c"""', "d"]),
        ("it's,that's", ["it's", "that's"]),
        ("a,,b", ["a", "", "b"]),
    ],
)
def test_commas_separate_values_outside_of_lists_tables_and_quotes(text, values):
    assert split_values(text) == values


@pytest.mark.parametrize("text", ["[1,2", "1],[2", '"a,b', "{a=1,b=2"])
def test_values_that_are_not_closed(text):
    with pytest.raises(ConfigError, match="is not closed"):
        split_values(text)


def test_overrides_do_not_change_what_they_were_given():
    tables = {"a": {"b": 1}}
    override(tables, ["a.b=2"])
    assert tables == {"a": {"b": 1}}


def test_files(tmp_path):
    path = tmp_path / "c.toml"
    path.write_text("[train]\nsteps = 5\n")
    assert load_config(path, ["train.steps=6"]).train.steps == 6
    with pytest.raises(
        ConfigError, match=r"c\.toml with --set train\.stepz=6: unknown key 'train\.stepz'"
    ):
        load_config(path, ["train.stepz=6"])
    path.write_bytes(b"\xef\xbb\xbf[train]\r\nsteps = 7\r\n")  # as editors on Windows write it
    assert load_config(path).train.steps == 7
    path.write_text("[train]\nsteps = \n")
    with pytest.raises(ConfigError, match=r"c\.toml: is not TOML: .*line 2"):
        load_config(path)
    path.write_bytes(b'name = "\xff"')
    with pytest.raises(ConfigError, match=r"c\.toml: is not UTF-8: byte 8 is 0xff"):
        load_config(path)
    with pytest.raises(ConfigError, match=r"nope\.toml: no such file"):
        load_config(tmp_path / "nope.toml")
    with pytest.raises(ConfigError, match="is a folder, not a file"):
        load_config(tmp_path)
