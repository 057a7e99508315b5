use super::*;
use proptest::prelude::*;

const NO_GRACE: Option<Duration> = None;
/// How long those who have ended wait for newcomers.
const LINGER: Duration = Duration::from_secs(10);

fn seconds(s: u64) -> Duration {
    Duration::from_secs(s)
}

fn work(samples: f64) -> Entry {
    Entry { samples, at_work: true, grace: NO_GRACE, ..Entry::default() }
}

fn within(grace: u64) -> Entry {
    Entry { grace: Some(seconds(grace)), ..work(1.0) }
}

impl Rounds {
    /// A worker enters by the terms of all.
    fn enters(&mut self, incarnation: u32, entry: Entry, now: Instant) -> Option<Part> {
        self.enter(incarnation, entry, now).unwrap()
    }

    /// So many are there, and nobody is lost.
    fn sees<const N: usize>(&mut self, there: [u32; N], now: Instant) {
        self.see(&there.into(), &BTreeSet::new(), now);
    }

    fn gathers(&mut self, incarnation: u32, round: u64) -> Option<u64> {
        self.gather(incarnation, round, Instant::now())
    }
}

/// Rounds of which these have been members for long.
fn rounds(members: &[u32], now: Instant) -> Rounds {
    let mut rounds = Rounds::default();
    rounds.roster.extend(members);
    for &member in members {
        rounds.enters(member, work(1.0), now);
    }
    for &member in members {
        rounds.gathers(member, 1);
    }
    assert_eq!(rounds.status(), RoundsStatus { closed: 1, missing: 0, ..RoundsStatus::default() });
    rounds
}

#[test]
fn a_round_closes_when_all_have_entered_and_each_has_its_share() {
    let now = Instant::now();
    let mut rounds = rounds(&[1, 2, 3], now);
    assert_eq!(rounds.enters(1, work(30.0), now), None);
    assert_eq!(rounds.enters(2, Entry { at_work: false, ..work(0.0) }, now), None);
    assert_eq!(rounds.status().open_entrants, 2);
    let part = |share| Part { round: 2, share, members: 3, at_work: 2, agreed: true, new_share: None };
    assert_eq!(rounds.enters(3, work(10.0), now), Some(part(0.25)));
    assert_eq!(rounds.enters(1, work(30.0), now), Some(part(0.75)));
    assert_eq!(rounds.enters(2, work(0.0), now), Some(part(0.0)));
    assert_eq!(rounds.status(), RoundsStatus { closed: 2, missing: 0, ..RoundsStatus::default() });
}

#[test]
fn where_nobody_has_samples_every_share_is_zero_and_many_are_not_too_many() {
    let now = Instant::now();
    let mut idle = rounds(&[1, 2], now);
    idle.enters(1, work(0.0), now);
    assert_eq!(idle.enters(2, work(0.0), now).unwrap().share, 0.0);
    for samples in [f64::MAX, f64::MIN_POSITIVE, 5e-324] {
        let mut rounds = rounds(&[1, 2], now);
        rounds.enters(1, work(samples), now);
        assert_eq!(rounds.enters(2, work(samples), now).unwrap().share, 0.5, "{samples}");
    }
}

#[test]
fn what_is_new_has_a_share_of_its_own_where_all_say_the_same_of_it() {
    let now = Instant::now();
    let new = |samples, of| Some(New { samples, of });
    let meet = |first: (f64, Option<New>), second: (f64, Option<New>)| {
        let mut rounds = rounds(&[1, 2], now);
        rounds.enters(1, Entry { new: first.1, ..work(first.0) }, now);
        let part = rounds.enters(2, Entry { new: second.1, ..work(second.0) }, now).unwrap();
        let other = rounds.enters(1, work(0.0), now).unwrap();
        [(other.share, other.new_share), (part.share, part.new_share)]
    };
    // The first has trained nothing since its round before, and what is new all the same.
    assert_eq!(meet((0.0, new(30.0, 7)), (20.0, new(10.0, 7))), [(0.0, Some(0.75)), (1.0, Some(0.25))]);
    assert_eq!(meet((6.0, new(0.0, 7)), (2.0, new(0.0, 7))), [(0.75, Some(0.0)), (0.25, Some(0.0))]);
    assert_eq!(meet((0.0, new(6.0, 7)), (0.0, new(2.0, 7))), [(0.0, None); 2], "nobody goes on in it");
    assert_eq!(meet((6.0, new(f64::MAX, 7)), (2.0, new(f64::MAX, 7)))[0], (0.75, Some(0.5)));
    for second in [None, new(10.0, 8)] {
        assert_eq!(meet((30.0, new(30.0, 7)), (10.0, second)), [(0.75, None), (0.25, None)]);
    }
}

#[test]
fn who_comes_first_is_alone_and_who_comes_then_is_waited_for() {
    let (mut rounds, now) = (Rounds::default(), Instant::now());
    assert!(!rounds.has_members());
    let alone = rounds.enters(1, work(4.0), now).unwrap();
    let (agreed, new_share) = (true, None);
    assert_eq!(alone, Part { round: 1, share: 1.0, members: 1, at_work: 1, agreed, new_share });
    assert_eq!(rounds.enters(2, work(1.0), now), None, "the first is at work");
    assert_eq!(rounds.gathers(1, 1), Some(0));
    assert_eq!(rounds.enters(1, work(1.0), now).map(|part| (part.round, part.members)), Some((2, 2)));
}

#[test]
fn who_is_slow_is_in_the_next_round_once_the_grace_has_passed() {
    let start = Instant::now();
    let mut rounds = rounds(&[1, 2, 3, 4], start);
    assert_eq!(rounds.enters(1, work(1.0), start), None);
    assert_eq!(rounds.deadline(), None, "nobody has said how long");
    assert_eq!(rounds.enters(2, within(5), start + seconds(3)), None);
    assert_eq!(rounds.deadline(), Some(start + seconds(5)), "from the first on");
    assert_eq!(rounds.enters(3, within(7), start + seconds(4)), None);
    assert_eq!(rounds.enters(3, within(8), start + seconds(5)), None, "it has changed its mind");
    rounds.tick(start + seconds(7));
    assert_eq!(rounds.status().closed, 1, "the largest counts");
    rounds.tick(start + seconds(8));
    assert_eq!(rounds.status().closed, 2);
    let late = start + seconds(9);
    assert_eq!(rounds.enters(4, work(1.0), late), None, "it waits for those of the next");
    for member in [1, 2, 3] {
        assert_eq!(rounds.enters(member, work(1.0), late).map(|p| (p.round, p.members)), Some((2, 3)));
        rounds.gathers(member, 2);
        rounds.enters(member, work(1.0), late);
    }
    assert_eq!(rounds.enters(4, work(1.0), late).map(|p| (p.round, p.members)), Some((3, 4)));
}

#[test]
fn a_standstill_of_the_server_is_taken_out_of_the_grace_and_of_what_a_push_took() {
    let start = Instant::now();
    let mut rounds = rounds(&[1, 2, 3], start);
    rounds.enters(1, within(5), start);
    rounds.enters(2, work(1.0), start + seconds(3));
    rounds.excuse(seconds(60), start + seconds(62));
    assert_eq!(rounds.deadline(), Some(start + seconds(65)), "it had 3 of 5 left");
    rounds.tick(start + seconds(64));
    assert_eq!(rounds.enters(3, work(1.0), start + seconds(64)).unwrap().members, 3);
    rounds.excuse(seconds(60), start + seconds(125));
    rounds.gather(1, 2, start + seconds(129));
    assert_eq!(rounds.overdue(seconds(1)), [(2, seconds(50)), (3, seconds(50))], "it took 5");
}

#[test]
fn who_enters_after_a_standstill_and_before_it_is_seen_has_the_whole_grace() {
    let start = Instant::now();
    let mut rounds = rounds(&[1, 2], start);
    rounds.enters(1, within(5), start + seconds(60));
    rounds.excuse(seconds(60), start + seconds(61));
    assert_eq!(rounds.deadline(), Some(start + seconds(66)), "from now on, and from nothing later");
}

#[test]
fn a_round_is_over_when_all_have_gathered_and_that_can_be_asked_again() {
    let now = Instant::now();
    let mut rounds = rounds(&[1, 2, 3], now);
    for member in 1..=3 {
        rounds.enters(member, work(1.0), now);
    }
    assert_eq!(rounds.gathers(1, 2), None);
    assert_eq!(rounds.gathers(1, 2), None);
    assert_eq!(rounds.gathers(2, 2), None);
    assert_eq!(rounds.gathers(3, 2), Some(0));
    assert_eq!((rounds.gathers(1, 2), rounds.gathers(2, 2)), (Some(0), Some(0)));
    assert_eq!(rounds.gathers(1, 77), Some(0), "of another life of the server");
}

#[test]
fn who_goes_holds_nobody_up_and_its_share_is_counted_as_missing() {
    let now = Instant::now();
    let mut rounds = rounds(&[1, 2, 3, 4], now);
    rounds.enters(1, work(1.0), now);
    rounds.enters(2, work(1.0), now);
    rounds.enters(3, work(2.0), now);
    rounds.lose(4, now);
    assert_eq!(rounds.status().closed, 2, "without anybody's asking");
    let part = rounds.enters(1, work(1.0), now).unwrap();
    assert_eq!((part.members, part.share), (3, 0.25), "the one that was waited for has gone");
    assert_eq!(rounds.gathers(1, 2), None);
    assert_eq!(rounds.gathers(2, 2), None);
    rounds.lose(2, now); // its share has come
    assert_eq!(rounds.gathers(1, 2), None);
    rounds.lose(3, now);
    assert_eq!(rounds.gathers(1, 2), Some(1));
    assert_eq!(rounds.gathers(1, 2), Some(1));
    assert_eq!(rounds.status(), RoundsStatus { closed: 2, missing: 1, ..RoundsStatus::default() });
    assert_eq!(rounds.enters(1, work(1.0), now).map(|p| p.members), Some(1), "it is alone");
}

#[test]
fn of_who_goes_before_the_round_closes_nothing_is_in_it() {
    let now = Instant::now();
    let mut rounds = rounds(&[1, 2, 3], now);
    rounds.enters(1, work(8.0), now);
    rounds.enters(2, work(1.0), now);
    rounds.lose(1, now);
    assert_eq!(rounds.enters(3, work(1.0), now).map(|p| (p.members, p.share)), Some((2, 0.5)));
    assert_eq!(rounds.enters(1, work(8.0), now), None, "who is back is in the next one");
}

#[test]
fn an_answer_that_was_lost_is_given_again_to_who_has_not_gathered() {
    let now = Instant::now();
    let mut rounds = rounds(&[1, 2], now);
    rounds.enters(1, work(3.0), now);
    let part = rounds.enters(2, work(1.0), now);
    assert_eq!(rounds.enters(2, work(99.0), now), part);
    // Its connection broke, as far as anybody knew.
    rounds.lose(2, now);
    assert_eq!(rounds.enters(2, work(1.0), now), part);
    assert_eq!(rounds.gathers(1, 2), None, "it is waited for again");
    rounds.lose(2, now);
    assert_eq!(rounds.status().missing, 1);
    assert_eq!(rounds.gathers(1, 2), Some(1));
    assert_eq!(rounds.enters(2, work(1.0), now), None, "that round is over");
}

#[test]
fn who_was_lost_in_its_push_and_gathers_before_the_others_has_brought_its_share() {
    let now = Instant::now();
    let mut rounds = rounds(&[1, 2, 3], now);
    for member in 1..=3 {
        rounds.enters(member, work(1.0), now);
    }
    rounds.lose(3, now);
    assert_eq!(rounds.gathers(1, 2), None);
    assert_eq!(rounds.gathers(3, 2), None);
    assert_eq!(rounds.gathers(2, 2), Some(0));
    assert_eq!((rounds.gathers(3, 2), rounds.gathers(1, 2)), (Some(0), Some(0)));
}

#[test]
fn only_those_who_are_there_are_kept() {
    let now = Instant::now();
    let mut rounds = rounds(&[1, 2, 3], now);
    rounds.enters(1, work(1.0), now);
    rounds.keep(|member| member == 1, now);
    assert_eq!(rounds.enters(1, work(1.0), now).map(|p| p.members), Some(1));
    rounds.keep(|_| false, now);
    assert!(!rounds.has_members() && rounds.closed.is_empty());
    assert_eq!(rounds.status(), RoundsStatus { closed: 2, missing: 1, ..RoundsStatus::default() });
}

#[test]
fn who_was_there_in_the_life_before_is_waited_for_until_it_comes_or_is_given_up() {
    let (mut rounds, now) = (Rounds::default(), Instant::now());
    rounds.expect([1, 2, 3].into(), seconds(10));
    let ends = || Entry { at_work: false, ..work(0.0) };
    assert_eq!(rounds.enters(1, ends(), now), None, "the others train, as far as anybody knows");
    rounds.keep(|member| member <= 2, now);
    assert_eq!(rounds.enters(1, ends(), now), None, "one of them has not been given up");
    assert_eq!(rounds.enters(2, work(1.0), now).map(|p| (p.round, p.members, p.at_work)), Some((1, 2, 1)));
    assert_eq!(rounds.enters(1, ends(), now).map(|p| p.at_work), Some(1), "so that it is not the end");
}

#[test]
fn those_of_the_life_before_are_waited_for_by_who_is_at_work_once_for_a_moment_and_by_who_has_ended_on() {
    let start = Instant::now();
    let mut rounds = Rounds::default();
    rounds.expect([1, 2].into(), seconds(10));
    let ends = || Entry { at_work: false, ..work(0.0) };
    assert_eq!(rounds.enters(3, ends(), start), None);
    rounds.tick(start + seconds(100));
    assert_eq!(rounds.status().open_entrants, 1, "others may be at work, as far as anybody knows");
    let begun = start + seconds(100);
    assert_eq!(rounds.enters(3, work(1.0), begun), None);
    rounds.tick(begun + seconds(9));
    assert_eq!(rounds.status().closed, 0);
    rounds.excuse(seconds(60), begun + seconds(69));
    rounds.tick(begun + seconds(69));
    assert_eq!(rounds.status().closed, 0, "the server stood still");
    rounds.tick(begun + seconds(70));
    let (agreed, new_share) = (false, None);
    let part = Part { round: 1, share: 1.0, members: 1, at_work: 1, agreed, new_share };
    assert_eq!(rounds.enters(3, work(1.0), begun + seconds(70)), Some(part));
    rounds.gathers(3, 1);
    let later = begun + seconds(71);
    assert_eq!(rounds.enters(3, work(1.0), later).map(|p| p.members), Some(1), "not once more");
    rounds.gathers(3, 2);
    assert_eq!(rounds.enters(3, ends(), later), None, "who has ended waits for them still");
    rounds.expect_only(|member| member == 2); // the first is back
    assert_eq!(rounds.enters(3, work(1.0), later), None, "and waited for as all who are there");
    assert_eq!(rounds.enters(1, work(1.0), later).map(|p| (p.members, p.agreed)), Some((2, false)));
    rounds.gathers(1, 3);
    rounds.gathers(3, 3);
    rounds.enters(1, ends(), later);
    assert_eq!(rounds.enters(3, ends(), later), None);
    assert_eq!(rounds.enters(2, ends(), later).map(|p| (p.members, p.agreed)), Some((3, true)));
}

#[test]
fn no_more_is_remembered_of_rounds_than_their_last() {
    let (mut rounds, now) = (Rounds::default(), Instant::now());
    for round in 1..=2 * MOST_REMEMBERED as u64 {
        assert_eq!(rounds.enters(1, work(1.0), now).unwrap().round, round);
        assert_eq!(rounds.gathers(1, round), Some(0));
    }
    assert_eq!((rounds.over.len(), rounds.closed.len()), (MOST_REMEMBERED, 0));
}

fn by(terms: &str, wish: Option<&str>) -> Entry {
    Entry { terms: Some(terms.into()), wish: wish.map(Arc::from), ..work(1.0) }
}

#[test]
fn who_would_take_part_by_other_terms_is_told_the_others_and_not_waited_for() {
    let (mut rounds, now) = (Rounds::default(), Instant::now());
    let other = |terms: &str| Err(OtherTerms(terms.into()));
    assert_eq!(rounds.enters(1, by("mean", None), now).unwrap().members, 1);
    assert_eq!(rounds.status().terms.as_deref(), Some("mean"));
    assert_eq!(rounds.enter(2, by("median", None), now), other("mean"));
    assert_eq!(rounds.enters(3, work(1.0), now), None, "who says nothing is with everybody");
    rounds.gathers(1, 1);
    assert_eq!(rounds.enters(1, by("mean", None), now).unwrap().members, 2);
    rounds.gathers(1, 2);
    rounds.gathers(3, 2);
    // Who was with them, and changes alone.
    assert_eq!(rounds.enter(1, by("median", None), now), other("mean"));
    assert_eq!(rounds.enters(3, by("mean", None), now).unwrap().members, 1, "that one is not waited for");
    rounds.lose(3, now);
    assert_eq!(rounds.status().terms, None, "nobody is there");
    assert_eq!(rounds.enters(1, by("median", None), now).unwrap().members, 1);
}

#[test]
fn terms_change_after_a_round_in_which_all_who_are_there_wished_for_it() {
    let now = Instant::now();
    let mut rounds = Rounds::default();
    let agreed = |part: Option<Part>| part.map(|part| part.agreed);
    assert_eq!(agreed(rounds.enters(1, by("mean", None), now)), Some(true));
    assert_eq!(rounds.enters(2, by("mean", None), now), None);
    rounds.gathers(1, 1);
    assert_eq!(agreed(rounds.enters(1, by("mean", Some("median")), now)), Some(false), "2 does not");
    rounds.gathers(1, 2);
    rounds.gathers(2, 2);
    assert_eq!(rounds.enters(1, by("mean", Some("median")), now), None);
    let late = now + seconds(2);
    assert_eq!(
        rounds.enters(1, Entry { grace: Some(seconds(1)), ..by("mean", Some("median")) }, late).unwrap(),
        Part { round: 3, share: 1.0, members: 1, at_work: 1, agreed: false, new_share: None }
    );
    rounds.gathers(1, 3);
    assert_eq!(rounds.enters(2, by("mean", Some("median")), now), None);
    assert_eq!(agreed(rounds.enters(1, by("mean", Some("median")), now)), Some(true));
    rounds.gathers(1, 4);
    // Asked again by who has not heard that it has changed, for the round that it is in.
    assert_eq!(agreed(rounds.enters(2, by("mean", Some("median")), now)), Some(true));
    rounds.gathers(2, 4);
    assert_eq!(rounds.enter(2, by("mean", None), now), Err(OtherTerms("median".into())));
    assert_eq!(agreed(rounds.enters(1, by("median", None), now)), Some(true));
}

#[test]
fn who_was_away_when_what_it_wishes_for_came_into_force_has_it_from_a_round_to_which_it_gives_nothing() {
    let now = Instant::now();
    let both_mean = || {
        let mut rounds = Rounds::default();
        rounds.enters(1, by("mean", None), now);
        assert_eq!(rounds.enters(2, by("mean", None), now), None);
        rounds.gathers(1, 1);
        rounds.enters(1, by("mean", None), now);
        rounds.gathers(1, 2);
        rounds.gathers(2, 2);
        rounds
    };
    let changes = || by("mean", Some("median"));
    // It was away when the others agreed, or has lost the answer that said so with its connection.
    for was_in in [false, true] {
        let mut rounds = both_mean();
        if was_in {
            assert_eq!(rounds.enters(2, changes(), now), None);
        } else {
            rounds.lose(2, now);
        }
        let part = rounds.enters(1, changes(), now).unwrap();
        assert_eq!((part.members, part.agreed), (1 + u32::from(was_in), true));
        rounds.lose(2, now);
        assert_eq!(rounds.gathers(1, 3), Some(u64::from(was_in)));
        assert_eq!(rounds.enter(2, by("mean", Some("mode")), now), Err(OtherTerms("median".into())));
        assert_eq!(rounds.enters(2, changes(), now), None, "the other one is at work");
        let part = |share| Part { round: 4, share, members: 2, at_work: 2, agreed: true, new_share: None };
        assert_eq!(rounds.enters(1, by("median", None), now), Some(part(1.0)));
        assert_eq!(rounds.enters(2, changes(), now), Some(part(0.0)));
        rounds.gathers(1, 4);
        rounds.gathers(2, 4);
        // Where the others go on to wish for something else, it has what it wished for all the same.
        assert_eq!(rounds.enters(1, by("median", Some("mode")), now), None);
        assert_eq!(rounds.enters(2, changes(), now).map(|p| (p.share, p.agreed)), Some((0.0, true)));
        assert_eq!(
            rounds.enters(1, by("median", None), now).map(|p| (p.share, p.agreed)),
            Some((1.0, false))
        );
        assert_eq!(rounds.terms.as_deref(), Some("median"));
    }
}

#[test]
fn a_round_waits_for_as_many_as_are_asked_for_unless_the_grace_has_passed() {
    let start = Instant::now();
    let three = || Entry { at_least: 3, ..within(5) };
    let mut rounds = Rounds::default();
    assert_eq!(rounds.enters(1, three(), start), None);
    assert_eq!(rounds.enters(2, work(1.0), start), None);
    assert_eq!(rounds.enters(3, three(), start).unwrap().members, 3);
    for member in 1..=3 {
        rounds.gathers(member, 1);
        rounds.lose(member, start);
    }
    assert_eq!(rounds.enters(1, three(), start), None);
    rounds.tick(start + seconds(5));
    assert_eq!(rounds.enters(1, three(), start + seconds(5)).unwrap().members, 1);
}

fn ended() -> Entry {
    Entry { at_work: false, linger: Some(LINGER), ..work(0.0) }
}

#[test]
fn those_who_have_all_ended_wait_for_a_newcomer_for_a_moment_and_once() {
    let start = Instant::now();
    let mut rounds = rounds(&[1, 2], start);
    rounds.sees([1, 2, 3], start);
    assert_eq!(rounds.enters(1, ended(), start), None);
    assert_eq!(rounds.enters(2, work(1.0), start).unwrap().members, 2, "who is at work is not held up");
    for member in 1..=2 {
        rounds.gathers(member, 2);
    }
    assert_eq!(rounds.enters(1, ended(), start), None);
    assert_eq!(rounds.enters(2, ended(), start + seconds(3)), None);
    let (before, end) = (start + LINGER, start + seconds(3) + LINGER);
    assert_eq!(rounds.next_look(start), Some(end), "from the last on");
    rounds.tick(before);
    assert_eq!((rounds.status().closed, rounds.status().newcomers), (2, vec![3]));
    rounds.tick(end);
    assert_eq!(rounds.enters(1, ended(), end).unwrap().members, 2);
    for member in 1..=2 {
        rounds.gathers(member, 3);
    }
    assert_eq!(rounds.enters(1, ended(), end), None);
    assert_eq!(rounds.enters(2, ended(), end).unwrap().members, 2, "it only looks on");
    for member in 1..=2 {
        rounds.gathers(member, 4);
    }
    assert_eq!(rounds.enters(1, ended(), end), None);
    rounds.sees([1, 2, 3, 4], end + seconds(1));
    assert_eq!(rounds.enters(2, ended(), end), None);
    assert_eq!(rounds.next_look(end), Some(end + seconds(1) + LINGER), "another one, from when it came");
    let part = rounds.enters(4, work(1.0), end + seconds(9)).unwrap();
    assert_eq!((part.members, part.at_work, part.share), (3, 1, 1.0));
}

#[test]
fn nobody_waits_for_a_newcomer_that_has_gone_nor_where_one_that_was_waited_for_is_lost() {
    let start = Instant::now();
    let mut left = rounds(&[1, 2], start);
    left.sees([1, 2, 3], start);
    assert_eq!(left.enters(1, ended(), start), None);
    assert_eq!(left.enters(2, ended(), start), None);
    left.sees([1, 2], start + seconds(1));
    assert_eq!(left.enters(1, ended(), start).unwrap().members, 2);

    let mut lost = rounds(&[1, 2], start);
    lost.sees([1, 2], start);
    assert_eq!(lost.enters(1, ended(), start), None);
    lost.lose(2, start + seconds(1));
    assert_eq!(lost.enters(1, ended(), start).unwrap().members, 1);
}

#[test]
fn however_many_newcomers_come_those_who_have_ended_wait_twice_as_long_as_they_say_at_most() {
    let start = Instant::now();
    let mut rounds = rounds(&[1], start);
    let (mut there, mut at) = (BTreeSet::from([1, 2]), start);
    rounds.see(&there, &BTreeSet::new(), at);
    while rounds.enters(1, ended(), at).is_none() {
        assert!(at <= start + 2 * LINGER, "there is always one more");
        at += seconds(1);
        let past = (at - start).as_secs();
        if past.is_multiple_of(4) {
            there.insert(u32::try_from(past).unwrap());
        }
        rounds.see(&there, &BTreeSet::new(), at);
    }
    assert_eq!(at, start + seconds(8) + LINGER, "for the last that came in time, from when it came");
}

#[test]
fn newcomers_that_enter_with_nothing_more_to_do_do_not_begin_that_wait_anew() {
    let start = Instant::now();
    let mut rounds = rounds(&[1], start);
    rounds.sees([1, 2, 3], start);
    assert_eq!(rounds.enters(1, ended(), start), None);
    assert_eq!(rounds.enters(2, ended(), start + seconds(9)), None);
    assert_eq!(rounds.next_look(start), Some(start + LINGER));
    rounds.tick(start + LINGER);
    assert_eq!(rounds.enters(2, ended(), start + LINGER).unwrap().members, 2);
}

#[test]
fn a_newcomer_that_is_lost_for_an_instant_is_told_of_and_not_waited_for_anew() {
    let start = Instant::now();
    let mut rounds = rounds(&[1], start);
    rounds.sees([1, 2], start);
    assert_eq!(rounds.enters(1, ended(), start), None);
    rounds.tick(start + LINGER);
    assert_eq!(rounds.enters(1, ended(), start + LINGER).unwrap().members, 1);
    rounds.gathers(1, 2);
    rounds.see(&[1].into(), &[2].into(), start + LINGER);
    assert_eq!(rounds.status().newcomers, [2], "it may come back");
    rounds.sees([1, 2], start + LINGER + seconds(1));
    assert!(rounds.enters(1, ended(), start + LINGER + seconds(1)).is_some(), "it was waited for already");
    rounds.gathers(1, 3);
    rounds.sees([1], start + LINGER + seconds(2));
    assert_eq!(rounds.status().newcomers, [0; 0], "it does not come back any more");
}

#[test]
fn who_was_given_up_or_refused_is_not_waited_for_as_a_newcomer_is() {
    let start = Instant::now();
    let mut rounds = rounds(&[1, 2], start);
    rounds.give_up(2, start);
    rounds.sees([1, 2, 3], start);
    let by = |terms: &str| Entry { terms: Some(terms.into()), ..ended() };
    rounds.enter(3, by("others"), start).unwrap_or_else(|_| unreachable!("nobody has any yet"));
    rounds.lose(3, start);
    assert!(rounds.enter(1, by("one"), start).unwrap().is_some());
    rounds.gathers(1, 2);
    rounds.sees([1, 2, 3], start);
    assert!(rounds.enter(3, by("others"), start).is_err());
    assert!(rounds.enter(1, by("one"), start).unwrap().is_some());
}

#[test]
fn who_has_ended_waits_for_no_number_and_who_does_not_say_for_no_newcomer() {
    let start = Instant::now();
    let mut rounds = rounds(&[1], start);
    rounds.sees([1, 2], start);
    let ended = Entry { at_work: false, at_least: 2, ..work(0.0) };
    assert_eq!(rounds.enters(1, ended, start).unwrap().members, 1);
}

#[test]
fn those_who_have_ended_wait_for_the_roster_however_long_that_takes() {
    let start = Instant::now();
    let mut rounds = rounds(&[1, 2], start);
    rounds.sees([1, 2, 3], start);
    assert_eq!(rounds.enters(1, ended(), start), None);
    let much_later = start + seconds(3600);
    rounds.tick(much_later);
    assert_eq!(rounds.next_look(much_later), None);
    assert_eq!(rounds.enters(2, work(1.0), much_later).unwrap().members, 2);
}

#[test]
fn who_is_waited_for_has_many_times_as_long_as_the_slowest_of_the_others() {
    let start = Instant::now();
    let mut rounds = rounds(&[1, 2, 3], start);
    for member in 1..=3 {
        rounds.enters(member, work(1.0), start);
    }
    assert_eq!(rounds.overdue(seconds(30)), [], "nobody waits yet");
    rounds.gather(1, 2, start + seconds(1));
    assert_eq!(rounds.overdue(seconds(30)), [(2, seconds(30)), (3, seconds(30))]);
    rounds.gather(2, 2, start + seconds(7));
    rounds.gather(1, 2, start + seconds(9)); // asks again, which tells nothing of how long it took
    assert_eq!(rounds.overdue(seconds(30)), [(3, seconds(70))]);
    rounds.lose(3, start + seconds(80));
    assert_eq!((rounds.overdue(seconds(30)), rounds.status().missing), (vec![], 1));
    // It wakes up: its round is over. It may enter the next one.
    assert_eq!(rounds.gathers(3, 2), Some(1));
    assert_eq!(rounds.enters(2, work(1.0), start), None);
    assert_eq!(rounds.enters(1, work(1.0), start).unwrap().members, 2, "but is not waited for");
}

#[test]
fn of_a_worker_no_more_is_kept_than_the_round_that_it_is_in() {
    let now = Instant::now();
    let members: Vec<u32> = (1..=40).collect();
    let mut rounds = rounds(&members, now);
    // In each round all that are left are, of whom one stays in it.
    for stays in 1..40 {
        for member in stays..40 {
            rounds.enters(member, work(1.0), now);
        }
        let last = rounds.enters(40, Entry { grace: Some(Duration::ZERO), ..work(1.0) }, now).unwrap();
        assert_eq!(last.members, 41 - stays);
        for member in stays + 1..=40 {
            assert_eq!(rounds.gathers(member, last.round), None);
        }
    }
    let kept: usize = rounds.closed.values().map(|closed| closed.entrants.len()).sum();
    assert_eq!((rounds.closed.len(), kept), (39, 39), "once each");
}

const MEMBERS: u32 = 5;

#[derive(Clone, Debug)]
enum Act {
    Enter(u32, Entry),
    Gather(u32),
    Lose(u32),
    /// Is there, and enters nothing yet.
    Come(u32),
    Pass(Duration),
}

fn acts() -> impl Strategy<Value = Vec<Act>> {
    let member = || 1..=MEMBERS;
    let samples = prop_oneof![Just(0.0), 0.0..1e6_f64, Just(f64::MAX), Just(5e-324)];
    let grace = prop::option::of((0..5_u64).prop_map(seconds));
    let linger = prop::option::of(prop_oneof![Just(LINGER), Just(seconds(2))]);
    let new = prop::option::weighted(0.8, (samples.clone(), prop_oneof![9 => Just(1), 1 => Just(2)]));
    let entry =
        (samples, any::<bool>(), grace, linger, new).prop_map(|(samples, at_work, grace, linger, new)| {
            Entry {
                samples,
                at_work,
                grace,
                linger,
                new: new.map(|(samples, of)| New { samples, of }),
                ..Entry::default()
            }
        });
    let act = prop_oneof![
        6 => (member(), entry).prop_map(|(member, entry)| Act::Enter(member, entry)),
        5 => member().prop_map(Act::Gather),
        1 => member().prop_map(Act::Lose),
        1 => member().prop_map(Act::Come),
        2 => prop_oneof![0..3_u64, Just(LINGER.as_secs())].prop_map(|s| Act::Pass(seconds(s))),
    ];
    prop::collection::vec(act, 0..200)
}

/// What members know, who ask after each act whether they may go on.
#[derive(Default)]
struct Seen {
    now: Duration,
    roster: BTreeSet<u32>,
    /// Who is there besides, since when, and whether it was waited for already.
    newcomers: BTreeMap<u32, (Duration, bool)>,
    /// Who waits for a round to close: since when, and what it said.
    waiting: BTreeMap<u32, (Duration, Entry)>,
    /// Who has a part, and has not gathered.
    working: BTreeMap<u32, Part>,
    /// Who waits for a round to be over.
    gathering: BTreeMap<u32, u64>,
    /// Of whom something was expected, and is not, unless they are back: in which round.
    missing: BTreeMap<u32, u64>,
    /// Since when all have ended who are waited for.
    ended: Option<Duration>,
    last_round: u64,
}

impl Seen {
    fn act(&mut self, rounds: &mut Rounds, start: Instant, act: Act) {
        let now = start + self.now;
        match act {
            Act::Enter(member, _) if self.gathering.contains_key(&member) => {}
            Act::Enter(member, entry) => {
                self.roster.insert(member);
                self.newcomers.remove(&member);
                let part = rounds.enters(member, entry.clone(), now);
                if let Some(held) = self.working.get(&member) {
                    assert_eq!(part, Some(*held), "the same again");
                } else if self.missing.contains_key(&member) {
                    // Only as long as its round is not over, and then that it was in.
                    let round = self.missing.remove(&member);
                    let part = part.expect("the round that it was in is not over");
                    assert_eq!(Some(part.round), round);
                    self.working.insert(member, part);
                } else {
                    let since = self.waiting.get(&member).map_or(self.now, |(since, _)| *since);
                    self.waiting.insert(member, (since, entry));
                }
            }
            Act::Gather(member) => {
                if let Some(part) = self.working.remove(&member) {
                    rounds.gathers(member, part.round); // whose answer it asks for again with all the others
                    self.gathering.insert(member, part.round);
                }
            }
            Act::Lose(member) => {
                rounds.lose(member, now);
                self.roster.remove(&member);
                self.newcomers.remove(&member);
                self.waiting.remove(&member);
                self.gathering.remove(&member);
                if let Some(part) = self.working.remove(&member) {
                    self.missing.insert(member, part.round);
                }
            }
            Act::Come(member) => {
                if !self.roster.contains(&member) {
                    self.newcomers.entry(member).or_insert((self.now, false));
                }
            }
            Act::Pass(time) => {
                self.now += time;
                rounds.tick(start + self.now);
            }
        }
        let there = self.roster.iter().chain(self.newcomers.keys()).copied().collect();
        rounds.see(&there, &BTreeSet::new(), start + self.now);
        let listed = self.newcomers.keys().copied().filter(|_| !self.roster.is_empty());
        assert_eq!(rounds.status().newcomers, listed.collect::<Vec<_>>());
        self.look(rounds, start + self.now);
    }

    /// Since when those who wait, and have all ended, wait for newcomers, and how long.
    fn linger(&self) -> Option<(Duration, Duration)> {
        let linger = self.waiting.values().filter_map(|(_, entry)| entry.linger).max()?;
        Some((self.ended?, linger))
    }

    /// Until when.
    fn lingers_until(&self) -> Option<Duration> {
        let (last, linger) = self.linger()?;
        let in_time = |(since, in_vain): &&(Duration, bool)| !in_vain && *since <= last + linger;
        let come = self.newcomers.values().filter(in_time).map(|(since, _)| *since).max()?;
        Some(come.max(last) + linger)
    }

    fn is_due(&self) -> bool {
        let all = self.roster.iter().all(|member| self.waiting.contains_key(member));
        let first = self.waiting.values().map(|(since, _)| *since).min();
        let grace = self.waiting.values().filter_map(|(_, entry)| entry.grace).max();
        let is_through = self.lingers_until().is_none_or(|until| self.now >= until);
        (all && is_through) || grace.is_some_and(|grace| self.now >= first.unwrap() + grace)
    }

    /// Everybody asks.
    fn look(&mut self, rounds: &mut Rounds, now: Instant) {
        let all = self.roster.iter().all(|member| self.waiting.contains_key(member));
        let have_ended = self.waiting.values().all(|(_, entry)| !entry.at_work);
        let is_so = !self.waiting.is_empty() && all && have_ended;
        self.ended = is_so.then(|| self.ended.unwrap_or(self.now));
        if !self.waiting.is_empty() {
            let must_close = self.is_due();
            let answers: Vec<(u32, Entry, Option<Part>)> = self
                .waiting
                .iter()
                .map(|(&member, (_, entry))| {
                    (member, entry.clone(), rounds.enters(member, entry.clone(), now))
                })
                .collect();
            assert_eq!(
                answers.iter().filter(|(.., part)| part.is_some()).count(),
                if must_close { answers.len() } else { 0 }
            );
            if must_close {
                if self.lingers_until().is_some_and(|until| self.now >= until) {
                    let (last, linger) = self.linger().unwrap();
                    let awaited = self.newcomers.values_mut().filter(|(since, _)| *since <= last + linger);
                    awaited.for_each(|(_, in_vain)| *in_vain = true);
                }
                self.waiting.clear();
                self.ended = None;
                self.last_round += 1;
                let at_work = answers.iter().filter(|(_, entry, _)| entry.at_work).count();
                let (mut sum, mut sum_new) = (0.0, 0.0);
                let of: BTreeSet<_> =
                    answers.iter().map(|(_, entry, _)| entry.new.map(|new| new.of)).collect();
                let has_samples = answers.iter().any(|(_, entry, _)| entry.samples > 0.0);
                let says_same = of.len() == 1 && !of.contains(&None) && has_samples;
                for (member, entry, part) in &answers {
                    let part = part.unwrap();
                    assert_eq!(part.round, self.last_round);
                    assert_eq!((part.members as usize, part.at_work as usize), (answers.len(), at_work));
                    assert!((0.0..=1.0).contains(&part.share) && (entry.samples > 0.0 || part.share == 0.0));
                    sum += part.share;
                    assert_eq!(part.new_share.is_some(), says_same);
                    sum_new += part.new_share.unwrap_or(0.0);
                    assert_eq!(self.working.insert(*member, part), None, "in two rounds");
                }
                let has_new = says_same && answers.iter().any(|(_, e, _)| e.new.unwrap().samples > 0.0);
                for (sum, is_any) in [(sum, has_samples), (sum_new, has_new)] {
                    assert!((sum - f64::from(u8::from(is_any))).abs() < 1e-12, "{sum}");
                }
            }
        }
        // Over is a round when nobody's push is to come; how many are missing is told to all alike.
        let mut told = BTreeMap::new();
        self.gathering.retain(|&member, round| {
            let is_over = !self.working.values().any(|part| part.round == *round);
            let answer = rounds.gathers(member, *round);
            if is_over {
                let missing = answer.expect("nobody is waited for");
                assert_eq!(*told.entry(*round).or_insert(missing), missing);
                assert_eq!(rounds.gathers(member, *round), Some(missing), "the same again");
            } else {
                assert_eq!(answer, None);
            }
            !is_over
        });
        for (round, missing) in told {
            let lost = self.missing.values().filter(|in_round| **in_round == round).count();
            assert!(lost as u64 <= missing, "those that went and did not come back, and others");
        }
        let (working, gathering) = (&self.working, &self.gathering);
        self.missing.retain(|_, round| {
            working.values().any(|p| p.round == *round) || gathering.values().any(|r| r == round)
        });
    }
}

proptest! {
    #[test]
    fn whatever_they_do_nobody_waits_in_vain_and_every_round_is_whole(acts in acts(), last in 1..=MEMBERS) {
        let (mut rounds, start) = (Rounds::default(), Instant::now());
        let mut seen = Seen::default();
        for act in acts {
            seen.act(&mut rounds, start, act);
            prop_assert_eq!(&rounds.roster, &seen.roster);
            prop_assert_eq!(rounds.status().open_entrants, seen.waiting.len());
        }
        // All others go: whoever waits is answered.
        for member in (1..=MEMBERS).filter(|member| *member != last) {
            seen.act(&mut rounds, start, Act::Lose(member));
        }
        seen.act(&mut rounds, start, Act::Pass(LINGER));
        prop_assert!(seen.waiting.is_empty());
        seen.act(&mut rounds, start, Act::Gather(last));
        prop_assert!(seen.gathering.is_empty());
        seen.act(&mut rounds, start, Act::Enter(last, work(1.0)));
        prop_assert!(seen.waiting.is_empty());
        seen.act(&mut rounds, start, Act::Lose(last));
        prop_assert!(rounds.closed.is_empty() && rounds.open.is_empty(), "{:?}", rounds);
        prop_assert_eq!(rounds.status().closed, seen.last_round);
    }
}
