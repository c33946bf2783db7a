//! The best tree of a draft in which a token's probability depends on the path to it.
//!
//! A block drafter with a Markov head (DSpark) says for each level which tokens are likely, and for each prefix how much
//! more or less likely each of them is behind it. A list for every prefix would be too many, so each level looks at a few
//! of the best prefixes, the beams, as EAGLE-2's trees do (arXiv:2406.16858): their likeliest tokens are candidates, and
//! the best candidates are the beams of the next level. The tree has the best candidates of all levels.
//!
//! A level lists only the likeliest tokens before any bias. The others count in the sum of a distribution as they are,
//! without bias.

use super::lists::Lists;
use super::merge::{MergeLimits, MergedDrafts};
use crate::error::{Error, Result, in_range, same_length};

/// The candidates of one request.
#[derive(Debug, Clone, PartialEq)]
pub struct ListBeams {
    width: usize,
    tree: MergedDrafts,
    /// Candidates of the last level that the next one continues, best first; the root before the first level.
    beams: Vec<u32>,
    /// Place of each beam's parent among the beams of the level before.
    parents: Vec<u32>,
}

impl ListBeams {
    /// The root alone. At most `width` beams are kept, and as many candidates behind each.
    ///
    /// # Errors
    /// [`Error::OutOfRange`] for a root or a width.
    pub fn new(root: i32, width: usize) -> Result<Self> {
        in_range("root token", root, 0, i128::from(i32::MAX))?;
        in_range("beams", width as u64, 1, 64)?;
        Ok(Self { width, tree: MergedDrafts::of_root(root), beams: vec![0], parents: vec![0] })
    }

    /// Token of each beam.
    pub fn tokens(&self) -> impl ExactSizeIterator<Item = i32> {
        self.beams.iter().map(|&beam| self.tree.tokens()[beam as usize])
    }

    /// Place of each beam's parent among the beams of the level before; of the root, 0.
    pub fn parents(&self) -> &[u32] {
        &self.parents
    }

    /// Go one level on: `level` has one list, and `bias` is what each of its tokens' log-probabilities changes by behind
    /// each beam, `[beams * level.width]`.
    ///
    /// # Errors
    /// Those of a [list](Lists); [`Error::Mismatch`] for more than one or another number of biases; [`Error::Invalid`]
    /// for a bias that is not finite.
    pub fn advance(&mut self, level: Lists<'_>, bias: &[f32]) -> Result<()> {
        level.check()?;
        same_length("tokens of a level", level.tokens.len(), level.width)?;
        same_length("biases", bias.len(), self.beams.len() * level.width)?;
        if let Some(at) = bias.iter().position(|b| !b.is_finite()) {
            let got = format!("{} behind beam {}", bias[at], at / level.width);
            return Err(Error::Invalid { what: "bias", got, why: "must be finite".into() });
        }
        let left = (1.0 - level.log_probs.iter().map(|&p| f64::from(p).exp()).sum::<f64>()).max(0.0);
        let mut found: Vec<(u32, u32)> = Vec::new(); // candidates, and the beams that they continue
        let mut best: Vec<(f64, usize)> = Vec::with_capacity(level.width);
        for (b, (&beam, bias)) in self.beams.iter().zip(bias.chunks_exact(level.width)).enumerate() {
            best.clear();
            best.extend(level.log_probs.iter().zip(bias).map(|(&p, &b)| f64::from(p) + f64::from(b)).zip(0..));
            let most = best.iter().fold(0.0f64, |most, one| most.max(one.0));
            let sum = best.iter().map(|one| (one.0 - most).exp()).sum::<f64>() + left * (-most).exp();
            let all = most + sum.ln();
            best.sort_by(|x, y| y.0.total_cmp(&x.0)); // stable: of equal ones, the first
            let above = self.tree.scores()[beam as usize];
            for &(log_prob, i) in best.iter().take(self.width).filter(|one| one.0 > f64::NEG_INFINITY) {
                found.push((self.tree.len() as u32, b as u32));
                self.tree.push_scored(level.tokens[i], beam as i32, above + ((log_prob - all) as f32).min(0.0));
            }
        }
        let scores = self.tree.scores();
        found.sort_by(|x, y| scores[y.0 as usize].total_cmp(&scores[x.0 as usize]));
        found.truncate(self.width);
        (self.beams, self.parents) = found.into_iter().unzip();
        Ok(())
    }

    /// The tree of the best candidates within the limits, in the order of [`merge`](super::merge::merge).
    ///
    /// # Errors
    /// [`Error::OutOfRange`] for a limit.
    pub fn tree(&self, limits: MergeLimits) -> Result<MergedDrafts> {
        self.tree.pruned(limits)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_level_depends_on_the_beam_that_it_continues() {
        let half = 0.5f32.ln();
        let list = Lists { tokens: &[3, 4], log_probs: &[half, half], width: 2 };
        let mut beams = ListBeams::new(7, 2).unwrap();
        assert_eq!(beams.tokens().collect::<Vec<_>>(), [7]);
        beams.advance(list, &[0.0, 3.0f32.ln()]).unwrap(); // 1/4, 3/4
        assert_eq!((beams.tokens().collect::<Vec<_>>(), beams.parents()), (vec![4, 3], &[0, 0][..]));
        beams.advance(list, &[0.0, 0.0, 9.0f32.ln(), 0.0]).unwrap(); // behind 4: halves; behind 3: 9/10, 1/10
        assert_eq!((beams.tokens().collect::<Vec<_>>(), beams.parents()), (vec![3, 4], &[0, 0][..]));
        let tree = beams.tree(MergeLimits::new(9, 9)).unwrap();
        assert_eq!((tree.tokens(), tree.parents()), (&[7, 4, 3, 4, 3, 3, 4][..], &[-1, 0, 1, 1, 0, 4, 4][..]));
        let want = [1.0, 0.75, 0.375, 0.375, 0.25, 0.225, 0.025];
        for (got, want) in tree.scores().iter().zip(want) {
            assert!((got.exp() - want).abs() < 1e-6, "{got} for {want}");
        }
        assert_eq!(beams.tree(MergeLimits::new(3, 9)).unwrap().tokens(), [7, 4, 3]);
    }

    #[test]
    fn tokens_that_are_not_listed_keep_their_share() {
        let quarter = 0.25f32.ln();
        let mut beams = ListBeams::new(0, 1).unwrap();
        beams.advance(Lists { tokens: &[5], log_probs: &[quarter], width: 1 }, &[3.0f32.ln()]).unwrap();
        assert!((beams.tree(MergeLimits::new(2, 1)).unwrap().scores()[1].exp() - 0.5).abs() < 1e-6);
        let none = Lists { tokens: &[5], log_probs: &[f32::NEG_INFINITY], width: 1 };
        beams.advance(none, &[0.0]).unwrap();
        assert_eq!(beams.tokens().len(), 0);
        beams.advance(none, &[]).unwrap();
        assert_eq!(beams.tree(MergeLimits::new(9, 9)).unwrap().len(), 2);
    }

    #[test]
    fn biases_that_are_none_are_refused() {
        let list = Lists { tokens: &[5, 6], log_probs: &[-1.0, -1.0], width: 2 };
        let mut beams = ListBeams::new(0, 2).unwrap();
        for bad in [&[0.0][..], &[0.0, f32::NAN], &[f32::INFINITY, 0.0], &[0.0; 4]] {
            assert!(beams.advance(list, bad).is_err(), "{bad:?}");
        }
        assert!(ListBeams::new(-1, 2).is_err() && ListBeams::new(0, 0).is_err() && ListBeams::new(0, 65).is_err());
        assert_eq!(beams, ListBeams::new(0, 2).unwrap(), "as before");
    }
}
