from __future__ import annotations

import time
from contextlib import suppress

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardplan.patterns import Alternative, parse_pattern


def matches(pattern: str, fqn: str, class_name: str = "Linear") -> bool:
    return any(alternative.matches(fqn, class_name) for alternative in parse_pattern(pattern).alternatives)


def texts(pattern: str) -> list[str]:
    return [alternative.text for alternative in parse_pattern(pattern).alternatives]


@pytest.mark.parametrize(
    ("pattern", "fqn"),
    [
        ("lm_head", "lm_head"),
        ("layers.*.mlp", "layers.11.mlp"),
        ("**.q_proj", "q_proj"),
        ("**.q_proj", "model.layers.0.self_attn.q_proj"),
        ("layers.**", "layers"),
        ("layers.**", "layers.0.mlp.up_proj"),
        ("a.**.b", "a.b"),
        ("a.**.b", "a.x.y.b"),
        ("**", ""),
        ("layers.[0-3].mlp", "layers.3.mlp"),
        ("layers.[0-3,7].mlp", "layers.7.mlp"),
        ("*_proj", "q_proj"),
        ("*_proj", "_proj"),
        ("q*j", "q_proj"),
        ("{a.b,c}.d", "a.b.d"),
        ("{a{1,2},c}.d", "a2.d"),
        ("my-adapter.x", "my-adapter.x"),
    ],
)
def test_what_a_pattern_matches(pattern: str, fqn: str) -> None:
    assert matches(pattern, fqn)


@pytest.mark.parametrize(
    ("pattern", "fqn"),
    [
        ("lm_head", "model.lm_head"),
        ("lm_head", "lm_head.weight"),
        ("lm_head", "LM_HEAD"),
        ("layers.*.mlp", "layers.mlp"),
        ("layers.*.mlp", "layers.0.1.mlp"),
        ("*.q_proj", "layers.0.q_proj"),
        ("*", ""),
        ("mlp.gate", "mlp.gate_proj"),
        ("layers.[0-3].mlp", "layers.4.mlp"),
        ("layers.[0-3].mlp", "layers.03.mlp"),
        ("layers.[0-3].mlp", "layers.x.mlp"),
        ("layers.[0-3,7].mlp", "layers.5.mlp"),
        ("*_proj", "a.q_proj"),
        ("{a.b,c}.d", "b.d"),
    ],
)
def test_what_a_pattern_does_not_match(pattern: str, fqn: str) -> None:
    assert not matches(pattern, fqn)


def test_digits_in_names_are_plain_letters() -> None:
    names = [f"layers.{i}.feed_forward.{w}" for i in (0, 1) for w in ("w1", "w2", "w3", "w")]
    for wanted in ("w1", "w2", "w3"):
        found = [name for name in names if matches(f"layers.*.feed_forward.{wanted}", name)]
        assert found == [f"layers.0.feed_forward.{wanted}", f"layers.1.feed_forward.{wanted}"]


def test_a_class_narrows_a_path() -> None:
    assert matches("m@*Attention", "m", "NemotronHAttention")
    assert not matches("m@*Attention", "m", "NemotronHAttentionX")
    assert not matches("m@*attention", "m", "NemotronHAttention")
    assert matches("m@*{MLP,MOE,MoE}", "m", "NemotronHMOE")
    assert not matches("m@Linear", "m", "")


def test_braces_around_the_path_are_alternatives_and_those_around_classes_are_not() -> None:
    assert texts("{a,b}.{c,d}") == ["a.c", "a.d", "b.c", "b.d"]
    assert texts("{self_attn.o,mlp.down}_proj") == ["self_attn.o_proj", "mlp.down_proj"]
    assert texts("{a,a}") == ["a"]
    assert texts("{,post_}norm") == ["norm", "post_norm"]
    assert texts("{x.[0-3,7],y}.z") == ["x.[0-3,7].z", "y.z"]
    (only,) = parse_pattern("m@{A,B}*").alternatives
    assert only == Alternative("m@{A,B}*", False, ("m",), ("A*", "B*"))


def test_the_question_mark_makes_optional() -> None:
    assert parse_pattern("a.b?").optional
    assert parse_pattern("a.b?").alternatives[0].tokens == ("a", "b")
    assert parse_pattern("a@B?").alternatives[0].classes == ("B",)
    assert not parse_pattern("a.b").optional
    assert str(parse_pattern("a.b?")) == "a.b?"


@pytest.mark.parametrize(
    ("pattern", "root", "text", "tokens"),
    [
        (".layers.*", "model", "model.layers.*", ("model", "layers", "*")),
        (".layers.*", "a.b", "a.b.layers.*", ("a", "b", "layers", "*")),
        (".layers.*", "", "layers.*", ("layers", "*")),
        (".", "model", "model", ("model",)),
        (".", "", ".", ()),
        (".@Model", "model", "model@Model", ("model",)),
        ("lm_head", "model", "lm_head", ("lm_head",)),
    ],
)
def test_rooted(pattern: str, root: str, text: str, tokens: tuple[str, ...]) -> None:
    (alternative,) = parse_pattern(pattern).alternatives
    assert alternative.relative == pattern.startswith(".")
    absolute = alternative.rooted(root)
    assert (absolute.text, absolute.tokens, absolute.relative) == (text, tokens, False)


def test_the_bare_dot_is_the_root_itself() -> None:
    (alternative,) = parse_pattern(".").alternatives
    assert alternative.rooted("model").matches("model", "X")
    assert not alternative.rooted("model").matches("model.layers", "X")
    assert alternative.rooted("").matches("", "X")


@pytest.mark.parametrize(
    "ascending",
    [
        [
            "**",
            "**.q",
            "**.l.*.q",
            "*.*.*.q",
            "*.*.0.q",
            "m.l.**",
            "m.l.*.*",
            "m.l.*.q",
            "m.l.*0.q",
            "m.l.[0-3].q",
            "m.l.0.q",
        ],
        ["a.**", "a", "a@B"],
        ["a.**", "a.**.b", "a.*.b", "a.*_x.b", "a.[0-1].b", "a.c.b"],
        ["a.*.b", "a.*.b@C"],
    ],
)
def test_specificity_rises(ascending: list[str]) -> None:
    ranks = [parse_pattern(pattern).alternatives[0].specificity() for pattern in ascending]
    assert ranks == sorted(ranks)
    assert len(set(ranks)) == len(ranks)


def test_specificity_does_not_depend_on_names_or_spelling() -> None:
    assert rank("layers.*.up") == rank("blocks.*.down")
    assert rank("a.**.**.b") == rank("a.**.b")


def test_a_rule_that_claims_a_subtree_is_compared_as_if_depth_were_appended() -> None:
    assert rank("a.b", subtree=True) == rank("a.b.**")
    assert rank("a.**", subtree=True) == rank("a.**")
    assert rank("a.b.c") > rank("a.b", subtree=True)
    assert rank("a.*.c") > rank("a.*", subtree=True)
    assert rank("a.*.c") < rank("a.b", subtree=True)


def rank(pattern: str, subtree: bool = False) -> object:
    return parse_pattern(pattern).alternatives[0].specificity(subtree)


@pytest.mark.parametrize(
    ("pattern", "message"),
    [
        ("", "the pattern is empty: write a path such as .layers.*.mlp, or '.' for the root"),
        ("?", "the pattern is empty: write a path such as .layers.*.mlp, or '.' for the root"),
        ("w?.x", "'?' only stands at the end, where it lets the whole pattern match nothing"),
        ("a?@B", "'?' only stands at the end, where it lets the whole pattern match nothing"),
        ("a b", "a space cannot be part of a pattern: patterns are paths with *, **, {a,b}, [0-3] and @Class"),
        ("a.(b|c)", "'(' cannot be part of a pattern: patterns are paths with *, **, {a,b}, [0-3] and @Class"),
        ("a..b", "'a..b' has an empty name between two dots or at its end"),
        ("a.", "'a.' has an empty name between two dots or at its end"),
        ("..a", "'..a' has an empty name between two dots or at its end"),
        ("a.b**", "'**' stands alone between dots: 'b**' would be '*' within one name"),
        ("a.***", "'**' stands alone between dots: '***' would be '*' within one name"),
        ("l[0-3]", "'l[0-3]' is not a range: write [0-3] or [0-3,7], as a whole name between dots"),
        ("[a-c]", "'[a-c]' is not a range: write [0-3] or [0-3,7], as a whole name between dots"),
        ("a.[]", "'[]' is not a range: write [0-3] or [0-3,7], as a whole name between dots"),
        ("a.[3-0]", "the range 3-0 is empty: write the lower number first"),
        ("{a,b", "'{' is never closed"),
        ("a}.{b,c}", "'}' without '{' before it"),
        ("a.{}", "'{}' has nothing to choose from"),
        ("{a,}", "an alternative of the braces is empty: the root is written '.'"),
        ("a,b", "'a,b' is not a name: a comma only stands inside braces or a range"),
        ("{a@B,c}", "'@' cannot stand inside braces: write one rule for each class, or @{A,B} at the end"),
        ("@B", "'@Class' needs a path before it: '**@Class' is that class anywhere"),
        ("a@", "write exactly one class after one '@': .layers.*.mixer@*Attention"),
        ("a@B@C", "write exactly one class after one '@': .layers.*.mixer@*Attention"),
        ("a@B.c", "'B.c' is not a class name: after '@' write one, with '*' as a glob and {a,b} for several"),
        ("l.[0-9999999999]", "'[0-9999999999]' is not a range: write [0-3] or [0-3,7], as a whole name between dots"),
        ("{" * 33 + "a" + "}" * 33, "more than 32 pairs of braces"),
        ("{a,b}" * 11, "the braces expand to more than 1024 alternatives"),
    ],
)
def test_what_is_no_pattern(pattern: str, message: str) -> None:
    with pytest.raises(ValueError) as error:  # noqa: PT011  # the whole message is compared
        parse_pattern(pattern)
    assert str(error.value) == message


@given(st.integers(0, 2000), st.integers(0, 2000), st.integers(0, 2100))
def test_a_range_holds_exactly_its_numbers(low: int, width: int, number: int) -> None:
    high = low + width
    for candidate in (number, low - 1, low, high, high + 1):
        if candidate >= 0:
            assert matches(f"l.[{low}-{high}]", f"l.{candidate}") == (low <= candidate <= high)


TOKENS = st.lists(
    st.sampled_from(["a", "b", "0", "7", "12", "*", "**", "a*", "*b*", "[0-3]", "[0-3,12]"]), min_size=1, max_size=5
)
VOCABULARY = {"a", "b", "ab", "0", "3", "7", "12"}
NAMES = st.lists(st.sampled_from(sorted(VOCABULARY)), max_size=5)


@settings(max_examples=300)
@given(TOKENS, NAMES)
def test_matching_agrees_with_its_definition(tokens: list[str], names: list[str]) -> None:
    assert matches(".".join(tokens), ".".join(names)) == by_definition(tokens, names)


def by_definition(tokens: list[str], names: list[str]) -> bool:
    """Token by token, without regular expressions."""
    if not tokens:
        return not names
    if tokens[0] == "**":
        return any(by_definition(tokens[1:], names[skipped:]) for skipped in range(len(names) + 1))
    sets = {"*": VOCABULARY, "a*": {"a", "ab"}, "*b*": {"b", "ab"}, "[0-3]": {"0", "3"}, "[0-3,12]": {"0", "3", "12"}}
    return bool(names) and names[0] in sets.get(tokens[0], {tokens[0]}) and by_definition(tokens[1:], names[1:])


@given(st.text(alphabet="ab.*{}[]@?,0-3 ", max_size=20))
def test_any_text_is_a_pattern_or_a_value_error(text: str) -> None:
    with suppress(ValueError):
        assert parse_pattern(text).alternatives


def test_many_globs_take_no_time() -> None:
    start = time.process_time()
    assert not matches("*a" * 30 + "b", "a" * 60)
    assert not matches("**.*." * 30 + "b", ".".join("a" * 60))
    assert not matches("x@" + "*A" * 30 + "B", "x", "A" * 60)
    assert time.process_time() - start < 1
