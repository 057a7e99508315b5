//! Rounds, in which workers put together what each has made on its own: who is in one, with which share, and when all of
//! them are done. A plain state machine; what a round's members push is nothing to it, and time comes in as an argument.
//!
//! A worker *enters* when it has something to give. The round closes when all have entered that are waited for, those of
//! the roster, or when the grace has passed since the first did; who comes later is in the next one. Each is told its
//! share, pushes its part, and *gathers*: it is answered when all of its round have, so that a pull then brings what all
//! of them have made.
//!
//! Nobody is waited for who is not there. Who is lost comes off the roster, and of what it had entered for nothing is
//! expected any more; if it is heard again before the others are through, it goes on where it was. So does who is there
//! and does nothing for many times as long as others took ([`Rounds::overdue`]). Those of a life before are waited for though
//! they are not there: by who has ended for as long as they may come, and by who is at work for a moment, since a whole job
//! that was started again comes with others.
//!
//! Newcomers, who are there and have not entered yet, are not waited for by who is at work, since nobody knows how long
//! they will take to their first round. Those who have all ended may linger for them, so that they end together: once for
//! each, who may never come, as one that only looks on; and for no more than twice as long as they say, whoever comes
//! meanwhile.
//!
//! Workers may say by what *terms* they take part: the first on the roster says what it is by, and who says another is
//! refused, and not waited for. Terms change after a round in which the whole roster was, and wished for the same. Who was
//! away when those came into force that it wishes for has them from the next round that it is in, to which it gives nothing.
//!
//! Both questions may be asked again, as often as one likes, and are answered the same: replies get lost, and a session
//! asks again whenever something has changed.

use offbeat_core::wire::message::New;
use serde::Serialize;
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Who is in a round is given up when it has done nothing for so many times as long as the slowest that is through took.
const TIMES_THE_SLOWEST: u32 = 10;
/// Rounds that are over and of which it is still known how many shares were missing: who asks again is never further
/// behind, having no more than one answer to lose.
const MOST_REMEMBERED: usize = 1000;

/// What a worker says when it enters.
#[derive(Clone, Debug, Default, PartialEq)]
pub(super) struct Entry {
    /// Finite, and not negative: what its share is measured by.
    pub(super) samples: f64,
    /// Whether it goes on after this; else it only waits for the others' end.
    pub(super) at_work: bool,
    /// How long, since the first has entered, it would have the round wait for those who have not. `None`: it does not
    /// say, and where nobody does the round waits as long as it takes.
    pub(super) grace: Option<Duration>,
    /// How many it would have in the round, as long as it is at work; the most that anybody says counts.
    pub(super) at_least: u32,
    /// How long it would wait for each newcomer once all have ended; the longest that anybody says counts. `None`: not
    /// at all.
    pub(super) linger: Option<Duration>,
    /// By what it takes part; `None`: it does not say.
    pub(super) terms: Option<Arc<str>>,
    /// By what it would from the next round on; `None`: by the same.
    pub(super) wish: Option<Arc<str>>,
    /// What of its push other samples have led to, finite and not negative; `None`: nothing.
    pub(super) new: Option<New>,
}

/// By what others take part, which is not by what a worker would.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct OtherTerms(pub(super) Arc<str>);

/// A worker's part in a round that has closed.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Part {
    /// Counted from 1, by this server in this life.
    pub(super) round: u64,
    /// Of all samples in the round; 0 where nobody has any.
    pub(super) share: f64,
    pub(super) members: u32,
    /// How many of these go on.
    pub(super) at_work: u32,
    /// Whether the whole roster was in it, and wished for the same; or what it wished for was in force already.
    pub(super) agreed: bool,
    /// Of the samples of what is new, where all in the round say the same of it, and somebody has samples at all; 0 where
    /// nobody has any of these.
    pub(super) new_share: Option<f64>,
}

/// As a status tells of rounds.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub(super) struct RoundsStatus {
    pub(super) closed: u64,
    /// Shares of workers that were lost or went before they had gathered.
    pub(super) missing: u64,
    /// Who has entered the round that is open.
    pub(super) open_entrants: usize,
    /// Who has come and has not entered yet, or not since it was lost: by incarnation. Nobody, as long as nobody has
    /// entered.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub(super) newcomers: Vec<u32>,
    /// By what those take part who are there, if they say.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) terms: Option<String>,
}

/// Where an entrant of a closed round stands, until it has gathered.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Stage {
    /// Its push is still to come.
    Due,
    /// It went before its push was known to have ended.
    Missing,
}

/// A round of which somebody's push is still to come.
#[derive(Debug)]
struct Closed {
    /// Those that have not gathered: so a worker is kept of one round at most.
    entrants: BTreeMap<u32, (Part, Stage)>,
    since: Instant,
    /// How long the slowest took that has gathered.
    slowest: Option<Duration>,
}

impl Closed {
    fn num(&self, stage: Stage) -> u64 {
        self.entrants.values().filter(|(_, at)| *at == stage).count() as u64
    }
}

/// What shares are of.
#[derive(Clone, Copy)]
struct Whole {
    most: f64,
    /// Of all, of the most: so that no sum is too large for a float.
    sum: f64,
}

impl Whole {
    fn of(samples: impl Iterator<Item = f64> + Clone) -> Self {
        let most = samples.clone().fold(0.0, f64::max);
        let mut whole = Self { most, sum: 0.0 };
        whole.sum = samples.map(|samples| whole.part(samples)).sum();
        whole
    }

    fn part(self, samples: f64) -> f64 {
        if self.most > 0.0 { samples / self.most } else { 0.0 }
    }

    fn share(self, samples: f64) -> f64 {
        if self.sum > 0.0 { self.part(samples) / self.sum } else { 0.0 }
    }
}

/// Who has come and is not on the roster.
#[derive(Debug)]
struct Newcomer {
    since: Instant,
    /// It is heard; else it is lost, and may come back.
    is_there: bool,
    /// Those who have all ended have waited for it already, or are not to.
    is_done_with: bool,
}

/// All rounds of a server.
#[derive(Debug, Default)]
pub(super) struct Rounds {
    /// Who has ever entered, and is there, or was in the life before and is expected: by incarnation.
    roster: BTreeSet<u32>,
    /// Of these, who was in the life before and has not come.
    expected: BTreeSet<u32>,
    /// How long who is at work waits for them, once in all.
    patience: Duration,
    /// Since when somebody does.
    waits_since: Option<Instant>,
    newcomers: BTreeMap<u32, Newcomer>,
    /// Since when all who are waited for have entered the round that is open, and have ended.
    all_ended_since: Option<Instant>,
    /// Who has entered the round that is open, and when.
    open: BTreeMap<u32, (Entry, Instant)>,
    /// Those that are not over, by number.
    closed: BTreeMap<u64, Closed>,
    /// Those that are, and how many shares were missing; the oldest first.
    over: VecDeque<(u64, u64)>,
    num_closed: u64,
    num_missing: u64,
    /// By what those on the roster take part; `None`: nobody has said.
    terms: Option<Arc<str>>,
}

impl Rounds {
    /// Of a life before: those that were there, who are waited for until they are [lost](Self::lose), by who is at work
    /// for no longer than `patience`.
    pub(super) fn expect(&mut self, roster: BTreeSet<u32>, patience: Duration) {
        self.expected.clone_from(&roster);
        (self.roster, self.patience) = (roster, patience);
    }

    /// Of those that were expected, some may have come: they are waited for as all others are.
    pub(super) fn expect_only(&mut self, is_expected: impl Fn(u32) -> bool) {
        self.expected.retain(|&incarnation| is_expected(incarnation));
    }

    /// Who is waited for.
    pub(super) const fn roster(&self) -> &BTreeSet<u32> {
        &self.roster
    }

    /// A worker has something to give. Its part, once the round has closed; before that `None`, and what it says now
    /// takes the place of what it has said. Who has not gathered is given the part that it has.
    ///
    /// # Errors
    /// [`OtherTerms`]: it is not waited for.
    pub(super) fn enter(
        &mut self,
        incarnation: u32,
        mut entry: Entry,
        now: Instant,
    ) -> Result<Option<Part>, OtherTerms> {
        if let Some(part) = self.part(incarnation) {
            self.admit(incarnation);
            return Ok(Some(part));
        }
        if let Err(other) = self.meet_terms(incarnation, &entry) {
            if entry.wish.as_ref() != Some(&other.0) {
                self.give_up(incarnation, now);
                return Err(other);
            }
            (entry.samples, entry.new) = (0.0, None); // what it has made, it has made by other terms
        }
        self.admit(incarnation);
        self.expected.remove(&incarnation);
        if entry.at_work {
            self.waits_since.get_or_insert(now);
        }
        let since = self.open.get(&incarnation).map_or(now, |(_, since)| *since);
        self.open.insert(incarnation, (entry, since));
        self.close_if_due(now);
        Ok(self.part(incarnation))
    }

    /// Puts a worker on the roster.
    fn admit(&mut self, incarnation: u32) {
        self.roster.insert(incarnation);
        self.newcomers.remove(&incarnation);
    }

    /// Takes a worker's terms for those of all, if nobody else has any.
    fn meet_terms(&mut self, incarnation: u32, entry: &Entry) -> Result<(), OtherTerms> {
        if self.roster.iter().all(|one| *one == incarnation) {
            self.terms.clone_from(&entry.terms);
            return Ok(());
        }
        let Some(terms) = &entry.terms else { return Ok(()) };
        let theirs = self.terms.get_or_insert_with(|| Arc::clone(terms));
        if *theirs == *terms { Ok(()) } else { Err(OtherTerms(Arc::clone(theirs))) }
    }

    /// A worker's push has ended, however it did. How many shares were missing, once all of the round's have; before that
    /// `None`. A round that is not known, as of a server's life before, is over, and how many were is not known: 0.
    pub(super) fn gather(&mut self, incarnation: u32, round: u64, now: Instant) -> Option<u64> {
        let Some(closed) = self.closed.get_mut(&round) else {
            return Some(
                self.over.iter().find(|(number, _)| *number == round).map_or(0, |(_, missing)| *missing),
            );
        };
        // Who was lost and is back has brought its share after all.
        if closed.entrants.remove(&incarnation).is_some() {
            let took = now.saturating_duration_since(closed.since);
            closed.slowest = Some(closed.slowest.map_or(took, |slowest| slowest.max(took)));
        }
        self.end_if_through(round)
    }

    /// Whose push others wait for, and how long it may do nothing before they go on without it: at least so long, and
    /// many times as long as others took. [`Self::lose`] is what becomes of it then.
    pub(super) fn overdue(&self, least: Duration) -> Vec<(u32, Duration)> {
        let mut overdue = vec![];
        for closed in self.closed.values() {
            let Some(slowest) = closed.slowest else { continue };
            let patience = slowest.saturating_mul(TIMES_THE_SLOWEST).max(least);
            let due = closed.entrants.iter().filter(|(_, (_, stage))| *stage == Stage::Due);
            overdue.extend(due.map(|(&incarnation, _)| (incarnation, patience)));
        }
        overdue
    }

    /// A worker is not there any more.
    pub(super) fn lose(&mut self, incarnation: u32, now: Instant) {
        if !self.roster.remove(&incarnation) {
            return;
        }
        self.expected.remove(&incarnation);
        self.open.remove(&incarnation);
        let is_due = |(_, closed): &(&u64, &mut Closed)| {
            matches!(closed.entrants.get(&incarnation), Some((_, Stage::Due)))
        };
        let due = self.closed.iter_mut().find(is_due);
        if let Some((&round, closed)) = due {
            if let Some((_, stage)) = closed.entrants.get_mut(&incarnation) {
                *stage = Stage::Missing;
            }
            self.end_if_through(round);
        }
        self.close_if_due(now);
    }

    /// The same of everybody on the roster who is not there.
    pub(super) fn keep(&mut self, is_there: impl Fn(u32) -> bool, now: Instant) {
        let gone: Vec<u32> =
            self.roster.iter().copied().filter(|&incarnation| !is_there(incarnation)).collect();
        for incarnation in gone {
            self.lose(incarnation, now);
        }
    }

    /// A worker is there, and is not waited for until it enters again.
    pub(super) fn give_up(&mut self, incarnation: u32, now: Instant) {
        self.lose(incarnation, now);
        self.newcomers.insert(incarnation, Newcomer { since: now, is_there: true, is_done_with: true });
    }

    /// Takes note of who is there, in a round yet or not, and of who is lost and may come back.
    pub(super) fn see(&mut self, there: &BTreeSet<u32>, lost: &BTreeSet<u32>, now: Instant) {
        self.newcomers.retain(|incarnation, newcomer| {
            newcomer.is_there = there.contains(incarnation);
            newcomer.is_there || lost.contains(incarnation)
        });
        for &incarnation in there.difference(&self.roster) {
            let come = Newcomer { since: now, is_there: true, is_done_with: false };
            self.newcomers.entry(incarnation).or_insert(come);
        }
        self.close_if_due(now);
    }

    /// The server stood still for so long: that time is taken out of every grace, and of what a push took.
    pub(super) fn excuse(&mut self, standstill: Duration, now: Instant) {
        let entered = self.open.values_mut().map(|(_, since)| since).chain(&mut self.waits_since);
        let entered = entered.chain(&mut self.all_ended_since);
        let begun = self.closed.values_mut().map(|closed| &mut closed.since);
        let come = self.newcomers.values_mut().map(|newcomer| &mut newcomer.since);
        for since in entered.chain(begun).chain(come) {
            *since = (*since + standstill).min(now);
        }
    }

    #[cfg(test)]
    pub(super) fn rewind(&mut self, time: Duration) {
        self.open.values_mut().for_each(|(_, since)| *since -= time);
    }

    /// A look at the clock.
    pub(super) fn tick(&mut self, now: Instant) {
        self.close_if_due(now);
    }

    /// When the open round closes, whoever has entered by then; `None`: as long as it takes.
    pub(super) fn deadline(&self) -> Option<Instant> {
        let first = self.open.values().map(|(_, since)| *since).min()?;
        let grace = self.open.values().filter_map(|(entry, _)| entry.grace).max()?;
        first.checked_add(grace)
    }

    /// How long those who have all ended wait for a newcomer, and since when; `None`: they do not.
    fn linger(&self) -> Option<(Duration, Instant)> {
        let linger = self.open.values().filter_map(|(entry, _)| entry.linger).max()?;
        Some((linger, self.all_ended_since?))
    }

    /// Notes whether all who are waited for have entered the open round, and have ended. Newcomers that enter with nothing
    /// more to do do not begin that anew.
    fn note_whether_all_have_ended(&mut self, now: Instant) {
        let have_all = !self.open.is_empty()
            && self.open.values().all(|(entry, _)| !entry.at_work)
            && self.has_all_but(|_| false);
        self.all_ended_since = have_all.then(|| self.all_ended_since.unwrap_or(now));
    }

    /// Whom they wait for: who came before they had waited that long, each once. Of those that came still later there may
    /// be always one more.
    fn is_awaited(newcomer: &Newcomer, (linger, ended): (Duration, Instant)) -> bool {
        newcomer.is_there
            && !newcomer.is_done_with
            && newcomer.since.saturating_duration_since(ended) <= linger
    }

    /// Until when they do, which is for each from when it came, or the last of them ended.
    fn lingers_until(&self) -> Option<Instant> {
        let (linger, ended) = self.linger()?;
        let awaited = self.newcomers.values().filter(|newcomer| Self::is_awaited(newcomer, (linger, ended)));
        awaited.map(|newcomer| newcomer.since.max(ended)).max()?.checked_add(linger)
    }

    /// When the clock has to be looked at again, since the open round may close then.
    pub(super) fn next_look(&self, now: Instant) -> Option<Instant> {
        [self.deadline(), self.lingers_until()].into_iter().flatten().filter(|time| *time > now).min()
    }

    /// What those who wait wait for: how many rounds have closed, how many of them are not over, and when the next one
    /// closes.
    pub(super) fn milestones(&self) -> (u64, usize, Option<Instant>, Option<Instant>) {
        (self.num_closed, self.closed.len(), self.deadline(), self.lingers_until())
    }

    /// Whether anybody has ever entered and is there.
    pub(super) fn has_members(&self) -> bool {
        !self.roster.is_empty()
    }

    /// Whether it has entered the round that is open, and waits for the others.
    pub(super) fn is_waiting(&self, incarnation: u32) -> bool {
        self.open.contains_key(&incarnation)
    }

    pub(super) fn status(&self) -> RoundsStatus {
        RoundsStatus {
            closed: self.num_closed,
            missing: self.num_missing,
            open_entrants: self.open.len(),
            newcomers: self.newcomers.keys().copied().filter(|_| self.has_members()).collect(),
            terms: self.terms.as_deref().filter(|_| self.has_members()).map(str::to_owned),
        }
    }

    /// The part that a worker has and has not gathered. Who was given up is waited for again. It is never in two such
    /// rounds: as long as it is in one, it enters no other.
    fn part(&mut self, incarnation: u32) -> Option<Part> {
        self.closed.values_mut().find_map(|closed| {
            let (part, stage) = closed.entrants.get_mut(&incarnation)?;
            *stage = Stage::Due;
            Some(*part)
        })
    }

    fn close_if_due(&mut self, now: Instant) {
        self.note_whether_all_have_ended(now);
        let until = self.lingers_until();
        let is_full = || {
            let at_work = self.open.values().filter(|(entry, _)| entry.at_work);
            let at_least = at_work.map(|(entry, _)| entry.at_least).max().unwrap_or(0) as usize;
            self.open.len() >= at_least
                && until.is_none_or(|until| now >= until)
                && self.has_all_but(|incarnation| self.is_missed_by_none(incarnation, now))
        };
        let is_late = || self.deadline().is_some_and(|deadline| now >= deadline);
        if !self.open.is_empty() && (is_full() || is_late()) {
            if let Some(linger) = self.linger().filter(|_| until.is_some_and(|until| now >= until)) {
                let awaited = self.newcomers.values_mut().filter(|one| Self::is_awaited(one, linger));
                awaited.for_each(|newcomer| newcomer.is_done_with = true);
            }
            self.close(now);
        }
    }

    /// Whether all of the roster have entered the open round, besides those of whom this holds.
    fn has_all_but(&self, is_excepted: impl Fn(u32) -> bool) -> bool {
        self.roster
            .iter()
            .all(|&incarnation| self.open.contains_key(&incarnation) || is_excepted(incarnation))
    }

    /// Whether this is one of the life before, whom those at work who have entered have waited for long enough. Where
    /// nobody of them is at work, all wait for the end of those who may be.
    fn is_missed_by_none(&self, incarnation: u32, now: Instant) -> bool {
        self.expected.contains(&incarnation)
            && self.waits_since.is_some_and(|since| now.saturating_duration_since(since) >= self.patience)
            && self.open.values().any(|(entry, _)| entry.at_work)
    }

    /// What those wish for who have entered the open round, as far as they say.
    fn wishes(&self) -> impl Iterator<Item = &Arc<str>> {
        self.open.values().filter_map(|(entry, _)| entry.wish.as_ref().or(entry.terms.as_ref()))
    }

    fn close(&mut self, now: Instant) {
        self.num_closed += 1;
        let before = self.terms.clone();
        let wish = self.wishes().next().cloned();
        let agreed = self.has_all_but(|_| false) && self.wishes().all(|one| Some(one) == wish.as_ref());
        if agreed && wish.is_some() {
            self.terms = wish;
        }
        self.all_ended_since = None;
        let open = std::mem::take(&mut self.open);
        let members = u32::try_from(open.len()).unwrap_or(u32::MAX);
        let at_work = open.values().filter(|(entry, _)| entry.at_work).count();
        let at_work = u32::try_from(at_work).unwrap_or(u32::MAX);
        let whole = Whole::of(open.values().map(|(entry, _)| entry.samples));
        // Who says something else of what is new, or nothing, goes by the same share with all that it pushes: shares of two
        // wholes would not add up to 1.
        let of = open.values().next().and_then(|(entry, _)| entry.new).map(|new| new.of);
        let all_say = of.is_some() && open.values().all(|(entry, _)| entry.new.map(|new| new.of) == of);
        // Where nobody has any samples there is no round of the rest, which the push of what is new would make one.
        let new = (all_say && whole.sum > 0.0)
            .then(|| Whole::of(open.values().filter_map(|(entry, _)| Some(entry.new?.samples))));
        let round = self.num_closed;
        let entrants = open.into_iter().map(|(incarnation, (entry, _))| {
            // By other terms nobody is in it but who wished for those that are in force.
            let agreed = agreed || entry.terms.is_some() && entry.terms != before;
            let new_share = new.and_then(|whole| Some(whole.share(entry.new?.samples)));
            let part = Part { round, share: whole.share(entry.samples), members, at_work, agreed, new_share };
            (incarnation, (part, Stage::Due))
        });
        let entrants = entrants.collect();
        self.closed.insert(round, Closed { entrants, since: now, slowest: None });
    }

    /// Notes a round's end, if nobody's push is to come. How many shares were missing then.
    fn end_if_through(&mut self, round: u64) -> Option<u64> {
        let closed = self.closed.get(&round)?;
        if closed.num(Stage::Due) > 0 {
            return None;
        }
        let missing = closed.num(Stage::Missing);
        self.closed.remove(&round);
        self.num_missing += missing;
        self.over.push_back((round, missing));
        if self.over.len() > MOST_REMEMBERED {
            self.over.pop_front();
        }
        Some(missing)
    }
}

#[cfg(test)]
mod tests;
