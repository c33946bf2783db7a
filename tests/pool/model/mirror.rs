//! Copies of the page table that know of it only by what the pool tells, and a device that runs ahead of the host.

use std::collections::HashSet;
use std::sync::atomic::{AtomicU64, Ordering};

use specrs::pool::{ChangeKind, Epoch, Lease, SeqId, Tables};

use super::world::{Outcome, Reserved, World, kv_of};

/// Counts of what the runs have met, so that the test sees that it tests.
pub(super) static MET: [AtomicU64; 5] = [const { AtomicU64::new(0) }; 5];
pub(super) const WHOLE_ROWS: usize = 0;
pub(super) const LOOKS_LATE: usize = 1;
pub(super) const TWO_IN_FLIGHT: usize = 2;
pub(super) const RENEWED_IN_FLIGHT: usize = 3;
pub(super) const COPIED_IN_FLIGHT: usize = 4;

pub(super) fn met(what: usize) {
    MET[what].fetch_add(1, Ordering::Relaxed);
}

/// A copy of the page table.
#[derive(Debug, Clone, Default)]
pub(super) struct Mirror {
    table: Vec<i32>,
    epoch: Option<Epoch>,
}

impl Mirror {
    fn look(&mut self, t: &Tables<'_>, skips: impl Fn(u32) -> bool) -> Outcome {
        self.table.resize(t.table().len(), 0);
        let changes = t.changes(self.epoch).map_err(|e| e.to_string())?;
        for c in changes.iter() {
            if c.kind == ChangeKind::Order && skips(c.row) {
                continue;
            }
            let late = changes.whole_rows() && self.epoch.is_some();
            ensure!(!late || !skips(c.row), "row {} comes whole, with a round in flight", c.row);
            let at = c.row as usize * t.row_pages() as usize + c.first as usize;
            self.table[at..][..c.pages.len()].copy_from_slice(c.pages);
        }
        if changes.whole_rows() && self.epoch.is_some() {
            met(WHOLE_ROWS);
        }
        self.epoch = Some(changes.epoch());
        ensure!(t.changes(self.epoch).is_ok_and(|c| c.iter().next().is_none()), "changes of no time");
        Ok(())
    }

    fn same(&self, table: &[i32], who: &str) -> Outcome {
        let at = self.table.iter().zip(table).position(|(a, b)| a != b);
        ensure!(at.is_none(), "{who} differs at {at:?}: {:?}, the table is {table:?}", self.table);
        Ok(())
    }
}

/// The mirrors of a pool.
#[derive(Default)]
pub(super) struct Mirrors {
    /// Looks after each step.
    plain: Mirror,
    /// Looks after each step, and permutes its rows by what leases tell instead of storing them.
    follows: Mirror,
    /// Look now and then.
    late: [Mirror; 2],
    /// Looks before each launch; permutes its rows as rounds end on it, before the host learns of that.
    pub(super) device: Mirror,
}

/// A round of a batch that the device has run and the host does not know of. One entry a sequence of the lease.
pub(super) type Round = Vec<Accepted>;

#[derive(Debug, Clone, Default)]
pub(super) struct Accepted {
    tokens: Vec<u32>,
    /// Nodes of the paths: row positions from the length before the round.
    path: Vec<u32>,
}

/// `path`, then what it skips, ascending.
fn whole_order(path: &[u32]) -> Vec<u32> {
    let end = path.iter().max().map_or(0, |last| last + 1);
    path.iter().copied().chain((0..end).filter(|node| !path.contains(node))).collect()
}

/// Permute columns from `first` on as the end of a round does.
fn permute<T: Copy>(line: &mut [T], first: usize, path: &[u32]) {
    let old = line.to_vec();
    for (i, &from) in whole_order(path).iter().enumerate() {
        line[first + i] = old[first + from as usize];
    }
}

impl World {
    fn row<'a>(&self, table: &'a mut [i32], id: SeqId) -> &'a mut [i32] {
        let width = self.config.row_pages as usize;
        &mut table[id.row() as usize * width..][..width]
    }

    /// Rows that the device may have permuted without the host's knowledge.
    fn ahead(&self) -> HashSet<u32> {
        let flying = self.leases.iter().filter(|l| !l.flying.is_empty() && self.config.page.get() == 1);
        flying.flat_map(|l| &l.entries).map(|(id, ..)| id.row()).collect()
    }

    fn device_looks(&mut self) -> Outcome {
        let ahead = self.ahead();
        let device = &mut self.mirrors.device;
        self.pool.with_tables(|t| device.look(&t, |row| ahead.contains(&row))).map_err(|e| e.to_string())?
    }

    /// The device runs a round of a lease's batch to its end, and the host does not look.
    pub(super) fn launch(&mut self, lease: u16, accept: &[u16; 3], bits: u16) -> Outcome {
        if self.leases.is_empty() || self.leases[lease as usize % self.leases.len()].flying.len() == 2 {
            return Ok(());
        }
        self.device_looks()?;
        let at = lease as usize % self.leases.len();
        let p = self.config.page.get() as usize;
        let mut round = Round::new();
        for (i, (id, _, writes)) in self.leases[at].entries.clone().into_iter().enumerate() {
            let mut tokens = self.seq(id).tokens.clone();
            tokens.extend(self.leases[at].flying.iter().flat_map(|r| &r[i].tokens));
            let (first, room) = (tokens.len(), self.seq(id).pages.len() * p - tokens.len());
            let nodes = if writes { room.min(6) as u32 } else { 0 };
            let mut path: Vec<u32> = (0..nodes).filter(|n| accept[i % 3] >> n & 1 == 1).collect();
            let mut table = std::mem::take(&mut self.mirrors.device.table);
            let line = self.row(&mut table, id);
            for node in 0..nodes as usize {
                *self.slot(line[(first + node) / p] as u32, first + node) = u64::MAX;
            }
            if p == 1 {
                permute(line, first, &path);
            } else {
                path = (0..path.len() as u32).collect(); // the KV was moved
            }
            for pos in first..first + path.len() {
                tokens.push(u32::from(bits >> (pos % 16) & 1));
                *self.slot(line[pos / p] as u32, pos) = kv_of(&tokens);
            }
            self.mirrors.device.table = table;
            round.push(Accepted { tokens: tokens.split_off(first), path });
        }
        self.leases[at].flying.push_back(round);
        if self.leases[at].flying.len() == 2 {
            met(TWO_IN_FLIGHT);
        }
        Ok(())
    }

    /// The host learns what the oldest round in flight has accepted.
    pub(super) fn land(&mut self, lease: u16) -> Outcome {
        if self.leases.is_empty() {
            return Ok(());
        }
        let at = lease as usize % self.leases.len();
        let mut reserved = self.leases.swap_remove(at);
        let outcome = self.land_in(&mut reserved);
        self.leases.push(reserved);
        outcome
    }

    pub(super) fn land_in(&mut self, r: &mut Reserved) -> Outcome {
        let round = r.flying.pop_front().unwrap_or_else(|| vec![Accepted::default(); r.entries.len()]);
        let firsts: Vec<u32> = r.entries.iter().map(|(id, ..)| self.seq(*id).tokens.len() as u32).collect();
        if self.config.page.get() == 1 {
            let remaps = r.entries.iter().zip(&firsts).zip(&round).map(|(((id, ..), &n), a)| (*id, n, &a.path[..]));
            r.lease.remap_all(remaps).map_err(|e| e.to_string())?;
            let mut told = r.lease.permutations();
            for (((id, ..), &first), accepted) in r.entries.iter().zip(&firsts).zip(&round) {
                let want = whole_order(&accepted.path);
                let same = told.next().is_some_and(|p| (p.seq, p.first, p.order) == (*id, first, &want));
                ensure!(same, "sequence {id}: not {want:?} from {first}");
                let k = self.index(*id);
                permute(&mut self.seqs[k].pages, first as usize, &accepted.path);
            }
            ensure!(told.next().is_none(), "more permutations than remaps");
            self.follow(&r.lease);
        }
        let lengths: Vec<u32> = firsts.iter().zip(&round).map(|(n, a)| n + a.tokens.len() as u32).collect();
        r.lease.advance(&lengths).map_err(|e| e.to_string())?;
        for ((id, before, _), accepted) in r.entries.iter_mut().zip(round) {
            let k = self.index(*id);
            if !accepted.tokens.is_empty() {
                self.seqs[k].tokens.extend(accepted.tokens);
                *before = self.seqs[k].pages[..self.needed(self.seqs[k].tokens.len())].to_vec();
            }
        }
        Ok(())
    }

    /// Follows the last remap that a lease tells of, for the mirror that permutes its rows by it.
    pub(super) fn follow(&mut self, lease: &Lease) {
        let mut table = std::mem::take(&mut self.mirrors.follows.table);
        for p in lease.permutations() {
            p.apply(self.row(&mut table, p.seq), &mut vec![7; 3]);
        }
        self.mirrors.follows.table = table;
    }

    pub(super) fn late_look(&mut self, which: u16, anew: u8) -> Outcome {
        met(LOOKS_LATE);
        let mirror = &mut self.mirrors.late[which as usize % 2];
        let looked = self.pool.with_tables(|t| {
            match anew % 8 {
                0 => *mirror = Mirror::default(),
                1 => *mirror = Mirror { table: t.table().to_vec(), epoch: Some(t.epoch()) },
                _ => {}
            }
            mirror.look(&t, |_| false)?;
            mirror.same(t.table(), "a late mirror")
        });
        looked.map_err(|e| e.to_string())?
    }

    /// Every mirror that looks after each step.
    pub(super) fn check_mirrors(&mut self) -> Outcome {
        let table = self.pool.with_tables(|t| t.table().to_vec()).map_err(|e| e.to_string())?;
        let Mirrors { plain, follows, .. } = &mut self.mirrors;
        let looked = self.pool.with_tables(|t| plain.look(&t, |_| false).and(follows.look(&t, |_| true)));
        looked.map_err(|e| e.to_string())??;
        plain.same(&table, "a mirror")?;
        follows.same(&table, "a mirror that follows permutations")?;
        self.device_looks()?;
        // The device's rows are those of the host once it has landed every round.
        let mut landed = table;
        for l in self.leases.iter().filter(|_| self.config.page.get() == 1) {
            for (i, (id, ..)) in l.entries.iter().enumerate() {
                let mut first = self.seq(*id).tokens.len();
                for accepted in l.flying.iter().map(|round| &round[i]) {
                    permute(self.row(&mut landed, *id), first, &accepted.path);
                    first += accepted.tokens.len();
                }
            }
        }
        self.mirrors.device.same(&landed, "the device")
    }
}
