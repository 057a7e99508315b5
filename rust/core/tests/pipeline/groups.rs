//! Patterns over tensor names.

use offbeat_core::dtype::Dtype;
use offbeat_core::pipeline::groups::{assign, matches};
use offbeat_core::spec::{Group, Rule};
use offbeat_core::table::{Role, TensorSpec, TensorTable};
use proptest::prelude::*;

/// Of tensors with these names, several of one tensor divided by "=".
fn table(names: &[&str]) -> TensorTable {
    let tensor = |names: &&str| {
        let mut names = names.split('=').map(str::to_owned);
        TensorSpec {
            name: names.next().unwrap_or_default(),
            aliases: names.collect(),
            shape: vec![1],
            dtype: Dtype::F32,
            role: Role::Parameter,
        }
    };
    TensorTable::new(names.iter().map(tensor).collect()).expect("names that differ")
}

fn group(pattern: &str) -> Group {
    Group { pattern: pattern.to_owned(), lr: 0.1, rule: Rule::Add }
}

#[test]
fn the_first_matching_group_wins() {
    let groups = [group("*.bias"), group("layers.0.*"), group("*")];
    let names = ["layers.0.weight", "layers.0.bias", "layers.1.weight", "bias"];
    assert_eq!(assign(&groups, &table(&names)), [1, 0, 2, 2]);
}

#[test]
fn a_tied_tensor_is_in_a_group_by_any_of_its_names() {
    let groups = [group("head.*"), group("*")];
    assert_eq!(assign(&groups, &table(&["embed.weight=head.weight", "head.bias", "norm"])), [0, 0, 1]);
}

#[test]
fn what_no_pattern_matches_is_the_last_groups() {
    assert_eq!(assign(&[group("a"), group("b")], &table(&["c"])), [1]);
    assert_eq!(assign(&[], &table(&["c"])), [0]);
}

#[test]
fn patterns_are_the_shells() {
    for (pattern, name) in [
        ("*", ""),
        ("*", "layers.0.weight"),
        ("**", "x"),
        ("layers.?.weight", "layers.3.weight"),
        ("*.bias", "a.b.bias"),
        ("a*b*c", "a.b.b.c"),
        ("*a*", "bab"),
        ("??", "éß"),
        ("a[0]", "a[0]"),
    ] {
        assert!(matches(pattern, name), "{pattern} {name}");
    }
    for (pattern, name) in [
        ("", "x"),
        ("?", ""),
        ("layers.?.weight", "layers.10.weight"),
        ("*.bias", "bias"),
        ("*.bias", "a.bias.b"),
        ("a*b*c", "a.c.b"),
        ("A", "a"),
        ("a[0]", "a0"),
    ] {
        assert!(!matches(pattern, name), "{pattern} {name}");
    }
}

#[test]
fn a_hostile_pattern_takes_no_longer_than_its_size_squared() {
    // Exponential in a matcher that goes back to every star.
    let (pattern, name) = ("a*".repeat(2_000) + "b", "a".repeat(20_000));
    assert!(!matches(&pattern, &name));
}

/// The definition, without thought for speed.
fn by_definition(pattern: &[char], name: &[char]) -> bool {
    match (pattern, name) {
        ([], []) => true,
        (['*', rest @ ..], _) => (0..=name.len()).any(|taken| by_definition(rest, &name[taken..])),
        (['?', rest @ ..], [_, name @ ..]) => by_definition(rest, name),
        ([p, rest @ ..], [n, name @ ..]) if p == n => by_definition(rest, name),
        _ => false,
    }
}

proptest! {
    #[test]
    fn matching_is_what_the_definition_says(pattern in "[ab*?]{0,8}", name in "[ab]{0,10}") {
        let chars = |s: &str| s.chars().collect::<Vec<_>>();
        prop_assert_eq!(matches(&pattern, &name), by_definition(&chars(&pattern), &chars(&name)));
    }
}
