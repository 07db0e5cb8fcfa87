from __future__ import annotations

import time
from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from shardplan.diagnostics import Diagnostic, Location, PlanError
from shardplan.source import MAX_BYTES, MAX_DEPTH, Source, parse_source, read_source


def refusal(text: str) -> Diagnostic:
    """The one finding of text in which nothing can be relied on."""
    with pytest.raises(PlanError) as error:
        parse_source(text, "f.yaml")
    (finding,) = error.value.diagnostics
    return finding


def finding(text: str) -> Diagnostic:
    (found,) = parse_source(text, "f.yaml").findings
    return found


def first(text: str) -> Diagnostic:
    try:
        return parse_source(text, "f.yaml").findings[0]
    except PlanError as error:
        return error.diagnostics[0]


def test_data_and_the_place_of_each_key_and_value() -> None:
    source = parse_source("format: 1\nrules:\n  .a: {style: block}\nrecompute:\n- .b\n- .c\n", "f.yaml")
    assert source.data == {"format": 1, "rules": {".a": {"style": "block"}}, "recompute": [".b", ".c"]}
    assert source.findings == ()
    assert source.keys["rules", ".a", "style"] == Location("f.yaml", 3, 8)
    assert source.values["rules", ".a", "style"] == Location("f.yaml", 3, 15)
    assert source.locate(("recompute", 1)) == Location("f.yaml", 6, 3)
    assert source.locate(("rules", ".a", "input")) == source.keys["rules", ".a"]
    assert source.locate(("nowhere",)) == Location("f.yaml", 1, 1)


@pytest.mark.parametrize("char", list("*@{[?&%`!"))
@pytest.mark.parametrize("indent", ["", "  "])
def test_a_special_character_at_the_start_of_a_key(char: str, indent: str) -> None:
    closing = {"{": "}", "[": "]"}.get(char, "")
    text = f"{char}a{closing}.layers"
    found = first(f"x: 1\n{indent and 'rules:'}\n{indent}{text}: colwise  # why\n")
    assert found.where == Location("f.yaml", 3, len(indent) + 1)
    assert found.code == "SP003"
    assert found.message == f"'{char}' at the start of unquoted text means something else to YAML"
    assert found.hint == f'quote it: "{text}"'


@pytest.mark.parametrize("char", list("*@{[?&%`!"))
@pytest.mark.parametrize("comment", ["", "  # why"])
def test_a_special_character_at_the_start_of_a_value(char: str, comment: str) -> None:
    text = {"{": "{a,b}.x", "[": "[0-3].x"}.get(char, f"{char}a")
    found = first(f"x: 1\nextends: {text}{comment}\n")
    assert (found.code, found.where, found.hint) == ("SP003", Location("f.yaml", 2, 10), f'quote it: "{text}"')


@pytest.mark.parametrize(
    ("text", "column", "quoted"),
    [
        ("*: x", 1, "*"),
        ("**.q_proj: x", 1, "**.q_proj"),
        ('*.a"b: x', 1, '*.a\\"b'),
        ("{a,b}: x", 1, "{a,b}"),
        ("[0-3]: x", 1, "[0-3]"),
        ("? a: x", 1, "? a"),
        ("- *.q", 3, "*.q"),
        ("a: [b, *.q, c]", 8, "*.q"),
        ("a: {*.q: x}", 5, "*.q"),
        ("a: {.l.*.{a,b}: x}", 5, ".l.*.{a,b}"),
        ("a: [.l.{a,b}, c]", 5, ".l.{a,b}"),
        ("a: [.l.[0-3].x]", 5, ".l.[0-3].x"),
        ("a: {up_proj?: x}", 5, "up_proj?"),
        ("a: [?b]", 5, "?b"),
        ("a: *unknown", 4, "*unknown"),
        ("a: !!python/object/apply:os.system [x]", 4, "!!python/object/apply:os.system [x]"),
    ],
)
def test_quote_it(text: str, column: int, quoted: str) -> None:
    found = first(text)
    assert (found.code, found.where) == ("SP003", Location("f.yaml", 1, column))
    assert found.hint == f'quote it: "{quoted}"'


def test_the_quoted_text_is_what_was_meant() -> None:
    for text in ("*.q_proj", "{a,b}.x", '*"x"', "@A\\b", "%a"):
        quoted = first(f"{text}: colwise").hint.removeprefix("quote it: ")
        assert parse_source(f"{quoted}: colwise", "f.yaml").data == {text: "colwise"}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: b: c", "f.yaml:1:5: error SP002: ': ' where no key can end"),
        ("a:\n\tb: c", "f.yaml:2:1: error SP002: a tab where YAML wants spaces"),
        ("a: 'x\nb: c\n", "f.yaml:1:4: error SP002: a quote that is never closed"),
        ("a:\n  b\n  c: d", "f.yaml:3:4: error SP002: ': ' where no key can end"),
        ("a: b\nc\nd: e", "f.yaml:2:1: error SP002: a line that is neither 'key: value' nor a list item"),
        ("a: {b: c", "f.yaml:1:9: error SP002: expected ',' or '}', but got '<stream end>'"),
        ("- a\nb: c", "f.yaml:2:1: error SP002: expected <block end>, but found '?'"),
        ("ab: \x00b", "f.yaml:1:5: error SP002: the character U+0000 is not allowed in YAML"),
        ("a: 1\n---\nb: 2", "f.yaml:2:1: error SP002: a second document ('---') in one file"),
    ],
)
def test_what_is_not_yaml(text: str, message: str) -> None:
    assert str(refusal(text)).splitlines()[0] == message


@pytest.mark.parametrize("text", ["", "\n", " \n", "---\n"])
def test_an_empty_file(text: str) -> None:
    assert str(refusal(text)) == "f.yaml: error SP012: the file is empty\n    hint: a plan starts with 'format: 1'"


def test_a_file_of_comments() -> None:
    assert refusal("# a: b\n").message == "the file holds nothing but comments"


def test_a_duplicate_key_names_both_places() -> None:
    source = parse_source("rules:\n  .a: block\n  .b: null\n  .a: colwise\n", "f.yaml")
    assert [str(f) for f in source.findings] == [
        "f.yaml:4:3: error SP004: '.a' is written twice, first at f.yaml:2:3\n    hint: keep one, or merge the two"
    ]
    assert source.data["rules"] == {".a": "block", ".b": None}


@pytest.mark.parametrize(
    ("key", "kind"),
    [
        ("0", "a number"),
        (".5", "a number"),
        ("on", "a boolean"),
        ("True", "a boolean"),
        ("null", "null"),
        ("~", "null"),
    ],
)
def test_a_key_that_is_not_text(key: str, kind: str) -> None:
    found = finding(f"rules:\n  {key}: block\n")
    assert str(found) == (
        f"f.yaml:2:3: error SP005: the key '{key}' reads as {kind}, not as text\n    hint: quote it: \"{key}\""
    )
    assert parse_source(f'rules:\n  "{key}": block\n', "f.yaml").findings == ()


@pytest.mark.parametrize("text", ["a:\nb: 1", "a:   # nothing\nb: 1", "{a: , b: 1}"])
def test_a_key_without_a_value(text: str) -> None:
    found = finding(text)
    assert (found.code, found.message) == ("SP006", "'a' has no value")
    assert found.hint == "write its value, or remove the key"


@pytest.mark.parametrize("null", ["null", "~", "Null"])
def test_a_written_null_is_a_value(null: str) -> None:
    source = parse_source(f"rules:\n  .norm: {null}\n", "f.yaml")
    assert source.findings == ()
    assert source.data == {"rules": {".norm": None}}
    assert finding("rules:\n  .norm:\n").hint == "write its value, or null to replicate on purpose"


def test_an_empty_list_item() -> None:
    assert str(finding("a:\n- b\n-\n")).startswith("f.yaml:3:2: error SP006: an empty list item")


def test_merge_keys_are_refused() -> None:
    found = finding("a: &x {b: 1}\nc: {<<: *x}\n")
    assert (found.code, found.message) == ("SP007", "merge keys ('<<') are not supported")


def test_aliases_work() -> None:
    source = parse_source("a: &x {b: 1}\nc: *x\n", "f.yaml")
    assert source.data == {"a": {"b": 1}, "c": {"b": 1}}
    assert source.locate(("c", "b")) == Location("f.yaml", 1, 8)


@pytest.mark.parametrize(
    "text", ["a: &x [*x]", "a: &x {b: *x}", "[" * 20_000, "- " * 3000 + "x", "{a: " * 40 + "b" + "}" * 40]
)
def test_endless_and_deep_nesting(text: str) -> None:
    found = refusal(text)
    assert (found.code, found.message) == ("SP002", f"nested more than {MAX_DEPTH} levels deep")


def test_a_billion_laughs() -> None:
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]" for i in range(1, 12)]
    start = time.process_time()
    assert refusal("\n".join(lines)).message == "aliases expand to more than 50000 values"
    assert time.process_time() - start < 5


@pytest.mark.parametrize("value", ["2024-99-99", "0b_", "1" * 5000])
def test_a_value_that_yaml_cannot_convert(value: str) -> None:
    assert str(finding(f"a: {value}")).startswith("f.yaml:1:4: error SP002: a value that YAML cannot convert")


def test_findings_are_collected() -> None:
    source = parse_source("0: a\nb:\nc: 1\nc: 2\n? [d]\n: e\n", "f.yaml")
    assert [f.code for f in source.findings] == ["SP005", "SP006", "SP004", "SP003"]


def test_a_missing_file(tmp_path: Path) -> None:
    assert unreadable(tmp_path / "no.yaml") == f"'{tmp_path}/no.yaml' cannot be read: no such file or directory"


def test_a_directory(tmp_path: Path) -> None:
    assert unreadable(tmp_path) == f"'{tmp_path}' cannot be read: is a directory"


def test_a_path_with_a_nul() -> None:
    assert "cannot be read: embedded null byte" in unreadable(Path("a\0b.yaml"))


def test_other_encodings(tmp_path: Path) -> None:
    path = tmp_path / "f.yaml"
    path.write_bytes("format: 1\n# café".encode("latin-1"))
    assert unreadable(path) == f"'{path}' is not UTF-8 text (byte 15, line 2)"
    path.write_bytes("format: 1".encode("utf-16"))
    assert unreadable(path) == f"'{path}' is not UTF-8 text (byte 0, line 1)"
    path.write_bytes(b"\xef\xbb\xbfformat: 1\r\n")
    assert read_source(path).data == {"format": 1}
    assert read_source(path).keys["format",] == Location(str(path), 1, 1)
    path.write_bytes(b"\xef\xbb\xbf*.a: b\n")
    with pytest.raises(PlanError, match=r"yaml:1:1: error SP003"):
        read_source(path)


def test_a_huge_file(tmp_path: Path) -> None:
    path = tmp_path / "f.yaml"
    path.write_bytes(b"#" * (MAX_BYTES + 1))
    assert unreadable(path) == f"'{path}' is larger than 1 MiB, which no plan is"


def unreadable(path: Path) -> str:
    with pytest.raises(PlanError) as error:
        read_source(path)
    (found,) = error.value.diagnostics
    missing = "cannot be read" in found.message
    assert found.code == ("SP001" if missing else "SP012")
    return found.message


PIECES = st.sampled_from(
    [*"abc:{}[]*&?!%@`#'\"|>-,\t\n\n  .~0<\\\0\x85\u2028", ": ", "\n  ", "- ", "on", "null", "<<", "---\n"]
)


@given(st.lists(PIECES, max_size=25).map("".join))
def test_any_text_is_read_or_refused(text: str) -> None:
    source: Source | None
    try:
        source = parse_source(text, "f.yaml")
    except PlanError as error:
        assert error.diagnostics  # noqa: PT017  # nothing else may be raised
        return
    assert all(f.where for f in source.findings)
    if not source.findings:
        assert source.data == yaml.safe_load(text)
