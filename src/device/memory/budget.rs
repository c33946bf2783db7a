//! A configuration's memory on a device, line by line, before anything is allocated. Pure arithmetic.

use std::fmt;

use crate::error::{Error, Result};

/// Bytes by what they are for; at most one line grows with a number that may be chosen smaller.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Budget {
    fixed: Vec<(String, u64)>,
    scaled: Option<Scaled>,
}

/// A line of so many units.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Scaled {
    name: String,
    /// The number's name in the configuration, such as `num_pages`.
    unit: &'static str,
    bytes: u64,
    count: u64,
    /// The fewest with which the engine runs.
    least: u64,
}

/// Saturating: what does not fit 64 bits fits no device.
fn sum(parts: impl Iterator<Item = u64>) -> u64 {
    parts.fold(0, u64::saturating_add)
}

impl Budget {
    /// No lines.
    pub fn new() -> Self {
        Self::default()
    }

    /// Add a line.
    pub fn fixed(&mut self, name: impl Into<String>, bytes: u64) {
        self.fixed.push((name.into(), bytes));
    }

    /// Set the line that grows: `count` units of `bytes` each, where `unit` is the number's name in the configuration
    /// and `least` the fewest with which the engine runs.
    pub fn scaled(&mut self, name: impl Into<String>, unit: &'static str, bytes: u64, count: u64, least: u64) {
        self.scaled = Some(Scaled { name: name.into(), unit, bytes, count, least });
    }

    fn fixed_bytes(&self) -> u64 {
        sum(self.fixed.iter().map(|(_, bytes)| *bytes))
    }

    /// Bytes of all lines.
    pub fn bytes(&self) -> u64 {
        let scaled = self.scaled.as_ref().map_or(0, |s| s.bytes.saturating_mul(s.count));
        self.fixed_bytes().saturating_add(scaled)
    }

    /// Bytes of the smallest configuration of this kind: the growing line with its fewest units.
    pub fn least_bytes(&self) -> u64 {
        let scaled = self.scaled.as_ref().map_or(0, |s| s.bytes.saturating_mul(s.least));
        self.fixed_bytes().saturating_add(scaled)
    }

    /// The most units of the growing line that fit into `have` bytes; `None` where the fewest do not, or nothing grows.
    pub fn most_units(&self, have: u64) -> Option<u64> {
        let s = self.scaled.as_ref()?;
        let units = have.checked_sub(self.fixed_bytes())?.checked_div(s.bytes).unwrap_or(u64::MAX);
        (units >= s.least).then_some(units)
    }

    /// Check that all of it fits into `have` bytes of device `device`.
    ///
    /// # Errors
    /// [`Error::DeviceMemory`] with the lines, what is needed and free, and what would fit: the largest number of units
    /// or, where even the fewest are too many, the bytes that these need.
    pub fn check(&self, what: &str, device: i32, have: u64) -> Result<()> {
        let need = self.bytes();
        if need <= have {
            return Ok(());
        }
        let fits = match (&self.scaled, self.most_units(have)) {
            (Some(s), Some(most)) => format!("{} = {most} fits, {} was asked for", s.unit, s.count),
            (Some(s), None) => {
                let least = self.least_bytes();
                format!(
                    "the smallest that runs, {} = {}, needs {least} bytes: a smaller model or batch",
                    s.unit, s.least
                )
            }
            (None, _) => "nothing of it can be made smaller".into(),
        };
        let lines: Vec<String> = self.lines().map(|(name, bytes)| format!("{name} {bytes}")).collect();
        let hint = format!("{fits} ({})", lines.join(", "));
        Err(Error::DeviceMemory { what: what.into(), device, need, have, hint })
    }

    /// Name and bytes of each line.
    pub fn lines(&self) -> impl Iterator<Item = (String, u64)> + '_ {
        let scaled = self
            .scaled
            .iter()
            .map(|s| (format!("{}, {} {} of {}", s.name, s.count, s.unit, s.bytes), s.bytes.saturating_mul(s.count)));
        self.fixed.iter().cloned().chain(scaled)
    }
}

impl fmt::Display for Budget {
    /// A line each, in bytes and MiB, and their sum.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mib = |bytes: u64| bytes as f64 / (1 << 20) as f64;
        for (name, bytes) in self.lines() {
            writeln!(f, "{bytes:>16}  {:>12.1} MiB  {name}", mib(bytes))?;
        }
        write!(f, "{:>16}  {:>12.1} MiB  in all", self.bytes(), mib(self.bytes()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn budget(count: u64) -> Budget {
        let mut b = Budget::new();
        b.fixed("weights", 1000);
        b.fixed("workspace", 24);
        b.scaled("KV pool", "num_pages", 100, count, 4);
        b
    }

    #[test]
    fn what_fits_passes_and_what_does_not_says_what_would() {
        let b = budget(10);
        assert_eq!((b.bytes(), b.least_bytes()), (2024, 1424));
        assert!(b.check("the engine", 0, 2024).is_ok());
        let Err(Error::DeviceMemory { device, need, have, hint, .. }) = b.check("the engine", 3, 2023) else {
            panic!()
        };
        assert_eq!((device, need, have), (3, 2024, 2023));
        assert!(
            hint.starts_with("num_pages = 9 fits, 10 was asked for (weights 1000, workspace 24, KV pool, "),
            "{hint}"
        );
        let hint = b.check("the engine", 0, 1423).unwrap_err().to_string();
        assert!(hint.contains("num_pages = 4, needs 1424 bytes"), "{hint}");
        // The number that is told fits, and one more does not.
        for have in 1000..3000 {
            match b.most_units(have) {
                Some(most) => {
                    assert!(budget(most).check("x", 0, have).is_ok() && budget(most + 1).check("x", 0, have).is_err());
                    assert!(most >= 4);
                }
                None => assert!(have < 1424),
            }
        }
    }

    #[test]
    fn sizes_beyond_64_bits_fit_nowhere() {
        let mut b = budget(u64::MAX);
        assert_eq!(b.bytes(), u64::MAX);
        b.fixed("more", u64::MAX);
        assert!(b.check("x", 0, u64::MAX - 1).is_err());
        assert_eq!(b.most_units(u64::MAX - 1), None);
        let mut fixed = Budget::new();
        fixed.fixed("weights", 7);
        assert!(fixed.check("x", 0, 6).unwrap_err().to_string().contains("nothing of it can be made smaller"));
    }

    #[test]
    fn it_prints_its_lines_and_their_sum() {
        let text = budget(3).to_string();
        let lines: Vec<&str> = text.lines().collect();
        assert_eq!(lines.len(), 4);
        assert!(lines[2].contains("300 ") && lines[2].contains("KV pool, 3 num_pages of 100"), "{text}");
        assert!(lines[3].trim_start().starts_with("1324 ") && lines[3].ends_with("in all"), "{text}");
    }
}
