//! Numbers of a JSON schema as exact decimals, and the regular expressions of their texts.

use std::cmp::Ordering;

use super::term::Term;

/// Digits of a number in a schema, written out without an exponent, at most.
const MAX_DIGITS: usize = 400;
/// Multiples between two bounds that are listed one by one, at most.
const MAX_LISTED: i128 = 1000;
/// The largest divisor for which the lexer counts remainders.
const MAX_DIVISOR: u128 = 100_000;
/// The largest bound beside such a divisor.
const MAX_COUNTED: i128 = 1_000_000_000_000_000;
const WHOLE: &str = "(?:0|[1-9][0-9]*)";

/// A decimal number, exactly.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Decimal {
    negative: bool,
    /// Without leading zeros; "0" alone for none.
    whole: String,
    /// Digits behind the point, without trailing zeros.
    part: String,
}

impl Decimal {
    /// Read JSON's text of a number; `None` where it has too many digits.
    pub(super) fn parse(text: &str) -> Option<Self> {
        let (negative, text) = text.strip_prefix('-').map_or((false, text), |t| (true, t));
        let (mantissa, exponent) = text.split_once(['e', 'E']).unwrap_or((text, "0"));
        let (whole, part) = mantissa.split_once('.').unwrap_or((mantissa, ""));
        if mantissa.len() > MAX_DIGITS {
            return None;
        }
        let zero = mantissa.bytes().all(|b| matches!(b, b'0' | b'.'));
        let shift = if zero { 0 } else { exponent.trim_start_matches('+').parse::<i64>().ok()? };
        if shift.unsigned_abs() > MAX_DIGITS as u64 {
            return None;
        }
        let (mut whole, mut part) = (whole.to_string(), part.to_string());
        if shift > 0 {
            let shift = shift as usize;
            part.push_str(&"0".repeat(shift.saturating_sub(part.len())));
            whole.extend(part.drain(..shift));
        } else {
            let shift = shift.unsigned_abs() as usize;
            whole.insert_str(0, &"0".repeat((shift + 1).saturating_sub(whole.len())));
            part.insert_str(0, &whole.split_off(whole.len() - shift));
        }
        Some(Self::new(negative, &whole, &part))
    }

    fn new(negative: bool, whole: &str, part: &str) -> Self {
        let whole = trimmed(whole);
        let part = part.trim_end_matches('0').to_string();
        let zero = whole == "0" && part.is_empty();
        Self { negative: negative && !zero, whole, part }
    }

    /// `value / 10^scale`.
    fn scaled(value: i128, scale: u32) -> Self {
        let digits = format!("{:0>width$}", value.unsigned_abs(), width = scale as usize + 1);
        let (whole, part) = digits.split_at(digits.len() - scale as usize);
        Self::new(value < 0, whole, part)
    }

    /// Times 10^scale, where that is a whole number that fits.
    fn times(&self, scale: u32) -> Option<i128> {
        let zeros = (scale as usize).checked_sub(self.part.len())?;
        let value: i128 = format!("{}{}{}", self.whole, self.part, "0".repeat(zeros)).parse().ok()?;
        Some(if self.negative { -value } else { value })
    }

    /// The number as a length or a count; the largest one where it is beyond all numbers.
    pub(super) fn count(&self) -> Option<u64> {
        (!self.negative && self.is_whole()).then(|| self.whole.parse().unwrap_or(u64::MAX))
    }

    fn is_zero(&self) -> bool {
        self.whole == "0" && self.part.is_empty()
    }

    fn is_whole(&self) -> bool {
        self.part.is_empty()
    }

    /// The least whole number that is at least this one, or above it.
    fn ceiling(&self, above: bool) -> Self {
        match (self.negative, self.is_whole()) {
            (false, true) if !above => self.clone(),
            (false, _) => Self::new(false, &up(&self.whole), ""),
            (true, true) if above => Self::new(true, &down(&self.whole), ""),
            (true, _) => Self::new(true, &self.whole, ""),
        }
    }

    fn minus(&self) -> Self {
        Self::new(!self.negative, &self.whole, &self.part)
    }

    fn text(&self) -> String {
        let (sign, point) = (if self.negative { "-" } else { "" }, if self.is_whole() { "" } else { "." });
        format!("{sign}{}{point}{}", self.whole, self.part)
    }
}

impl Ord for Decimal {
    fn cmp(&self, other: &Self) -> Ordering {
        let size = |a: &Self, b: &Self| (a.whole.len(), &a.whole, &a.part).cmp(&(b.whole.len(), &b.whole, &b.part));
        match (self.negative, other.negative) {
            (false, false) => size(self, other),
            (true, true) => size(other, self),
            (false, true) => Ordering::Greater,
            (true, false) => Ordering::Less,
        }
    }
}

impl PartialOrd for Decimal {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

/// One end of a range.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Bound {
    pub(super) at: Decimal,
    /// True if `at` itself is outside.
    pub(super) open: bool,
}

/// Multiples of `of / 10^scale`; never of zero.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Multiple {
    of: u128,
    scale: u32,
}

impl Multiple {
    pub(super) fn new(of: &Decimal) -> Option<Self> {
        let scale = u32::try_from(of.part.len()).ok().filter(|&s| s <= 18)?;
        let of = of.times(scale)?.unsigned_abs();
        (of != 0 && of <= 1_000_000_000_000_000_000).then_some(Self { of, scale })
    }

    /// The common multiples of both.
    pub(super) fn both(&self, other: &Self) -> Option<Self> {
        let scale = self.scale.max(other.scale);
        let wide = |m: &Self| m.of.checked_mul(10u128.pow(scale - m.scale));
        let (a, b) = (wide(self)?, wide(other)?);
        let of = (a / divisor(a, b)).checked_mul(b)?;
        let mut found = Self { of, scale };
        while found.scale > 0 && found.of.is_multiple_of(10) {
            (found.of, found.scale) = (found.of / 10, found.scale - 1);
        }
        (found.of <= 1_000_000_000_000_000_000).then_some(found)
    }

    fn text(&self) -> String {
        Decimal::scaled(self.of as i128, self.scale).text()
    }
}

/// Conditions on a number.
#[derive(Debug, Clone, PartialEq, Default)]
pub(super) struct Numbers {
    pub(super) whole: bool,
    pub(super) low: Option<Bound>,
    pub(super) high: Option<Bound>,
    pub(super) multiple: Option<Multiple>,
    /// The values, in these texts, if the number is one of a list.
    pub(super) listed: Option<Vec<(String, Decimal)>>,
}

/// Ways to tell the texts of numbers.
#[derive(Debug, Clone, PartialEq)]
pub(super) enum Told {
    /// There are no such numbers.
    Never,
    /// The lexer tells them.
    Term(Term),
    /// Whole multiples of `of`, between bounds, told by llguidance's lexer of remainders.
    Counted { of: u64, low: Option<i64>, high: Option<i64> },
}

impl Numbers {
    pub(super) fn meet(&self, other: &Self) -> Result<Self, String> {
        let multiple = match (&self.multiple, &other.multiple) {
            (Some(a), Some(b)) => Some(a.both(b).ok_or_else(|| {
                format!(
                    "multipleOf = {} and multipleOf = {} together: their common multiple is too large",
                    a.text(),
                    b.text()
                )
            })?),
            (a, b) => a.clone().or_else(|| b.clone()),
        };
        let listed = match (&self.listed, &other.listed) {
            (Some(a), Some(b)) => Some(a.iter().filter(|(_, v)| b.iter().any(|(_, w)| v == w)).cloned().collect()),
            (a, b) => a.clone().or_else(|| b.clone()),
        };
        Ok(Self {
            whole: self.whole || other.whole,
            low: tighter(&self.low, &other.low, Ordering::Greater),
            high: tighter(&self.high, &other.high, Ordering::Less),
            multiple,
            listed,
        })
    }

    fn allows(&self, value: &Decimal) -> bool {
        let beyond = |bound: &Option<Bound>, side: Ordering| {
            bound.as_ref().is_some_and(|b| value.cmp(&b.at) == side || (b.open && *value == b.at))
        };
        let multiple = self.multiple.as_ref().is_none_or(|m| {
            let scale = m.scale.max(value.part.len() as u32);
            let wide = 10u128.checked_pow(scale - m.scale).and_then(|p| m.of.checked_mul(p));
            matches!((value.times(scale), wide), (Some(v), Some(of)) if v.unsigned_abs().is_multiple_of(of))
        });
        (!self.whole || value.is_whole())
            && !beyond(&self.low, Ordering::Less)
            && !beyond(&self.high, Ordering::Greater)
            && multiple
    }

    /// # Errors
    /// Multiples that no lexer tells.
    pub(super) fn told(&self) -> Result<Told, String> {
        if let Some(listed) = &self.listed {
            let texts: Vec<Term> =
                listed.iter().filter(|(_, v)| self.allows(v)).map(|(t, _)| Term::rx(escaped(t))).collect();
            return Ok(if texts.is_empty() { Told::Never } else { Told::Term(Term::any(texts)) });
        }
        let mut multiple = self.multiple.clone();
        if self.whole
            && let Some(m) = &multiple
        {
            let one = Multiple { of: 1, scale: 0 };
            multiple = Some(m.both(&one).ok_or_else(|| format!("multipleOf = {}: too large for integers", m.text()))?);
        }
        let whole = self.whole || multiple.as_ref().is_some_and(|m| m.scale == 0);
        let (mut low, mut high) = (self.low.clone(), self.high.clone());
        if whole {
            let closed = |at| Bound { at, open: false };
            low = low.map(|b| closed(b.at.ceiling(b.open)));
            high = high.map(|b| closed(b.at.minus().ceiling(b.open).minus()));
        }
        if let (Some(l), Some(h)) = (&low, &high)
            && (l.at > h.at || (l.at == h.at && (l.open || h.open)))
        {
            return Ok(Told::Never);
        }
        if let Some(m) = multiple.filter(|m| *m != Multiple { of: 1, scale: 0 }) {
            return multiples(&m, low, high);
        }
        let free = low.is_none() && high.is_none();
        let base = match (whole, free) {
            (true, _) => format!("-?{WHOLE}"),
            (false, true) => format!(r"-?{WHOLE}(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?"),
            (false, false) => format!(r"-?{WHOLE}(?:\.[0-9]+)?"),
        };
        Ok(Told::Term(ranged(base, low, high)))
    }
}

fn ranged(base: String, low: Option<Bound>, high: Option<Bound>) -> Term {
    let mut all = vec![Term::rx(base)];
    all.extend(low.map(|b| Term::rx(at_least(&b))));
    // x <= h is -x >= -h: the signs change places.
    all.extend(high.map(|b| Term::rx(at_most(&b))));
    Term::all(all)
}

fn multiples(m: &Multiple, low: Option<Bound>, high: Option<Bound>) -> Result<Told, String> {
    if let Some(listed) = listed_multiples(m, low.as_ref(), high.as_ref()) {
        let texts: Vec<Term> = listed.iter().map(|v| Term::rx(escaped(&v.text()))).collect();
        return Ok(if texts.is_empty() { Told::Never } else { Told::Term(Term::any(texts)) });
    }
    if let Some(digits) = by_digits(m) {
        return Ok(Told::Term(ranged(format!("-?(?:{digits})"), low, high)));
    }
    let counted = |b: Option<Bound>| match b {
        None => Ok(None),
        Some(b) => {
            let at = b.at.times(0).filter(|at| at.abs() <= MAX_COUNTED);
            at.map(|at| Some(at as i64)).ok_or(())
        }
    };
    if m.scale == 0
        && m.of <= MAX_DIVISOR
        && let (Ok(low), Ok(high)) = (counted(low), counted(high))
    {
        return Ok(Told::Counted { of: m.of as u64, low, high });
    }
    Err(format!(
        "multipleOf = {}: is not enforced; what works is a divisor of a power of ten, an integer up to {MAX_DIVISOR} (with bounds up to \
         {MAX_COUNTED}), or any with bounds that leave at most {MAX_LISTED} numbers",
        m.text()
    ))
}

/// The multiples between two bounds; `None` where there are many.
fn listed_multiples(m: &Multiple, low: Option<&Bound>, high: Option<&Bound>) -> Option<Vec<Decimal>> {
    let (low, high) = (low?, high?);
    let scale = m.scale.max(low.at.part.len() as u32).max(high.at.part.len() as u32);
    let of = i128::try_from(m.of.checked_mul(10u128.checked_pow(scale - m.scale)?)?).ok()?;
    let (from, to) = (low.at.times(scale)?, high.at.times(scale)?);
    let mut first = from.div_euclid(of) + i128::from(from.rem_euclid(of) != 0);
    let mut last = to.div_euclid(of);
    first += i128::from(low.open && first.checked_mul(of)? == from);
    last -= i128::from(high.open && last.checked_mul(of)? == to);
    if last.checked_sub(first)? >= MAX_LISTED {
        return None;
    }
    Some((first..=last).map(|i| Decimal::scaled(i * of, scale)).collect())
}

/// The unsigned multiples by their last digits, where `m` divides a power of ten.
fn by_digits(m: &Multiple) -> Option<String> {
    let mut power = 0u32;
    while power <= 6 && !10u128.pow(power).is_multiple_of(m.of) {
        power += 1;
    }
    if power > 6 || 10u128.pow(power) / m.of > 1000 {
        return None;
    }
    let scale = m.scale as usize;
    let digits = power as usize;
    let mut found = Vec::new();
    for i in 0..10u128.pow(power) / m.of {
        let last = if digits == 0 { String::new() } else { format!("{:0>digits$}", i * m.of) };
        if digits <= scale {
            // Within the fraction: free digits, then these, whose trailing zeros may be left out.
            let free = scale - digits;
            let kept = last.trim_end_matches('0');
            for end in kept.len()..=last.len() {
                if end > 0 {
                    found.push(format!(r"{WHOLE}\.[0-9]{{{free}}}{}", &last[..end]));
                }
            }
            if kept.is_empty() {
                let free = if free > 0 { format!(r"(?:\.[0-9]{{1,{free}}})?") } else { String::new() };
                found.push(format!("{WHOLE}{free}"));
            }
        } else {
            let (whole, part) = last.split_at(digits - scale);
            let kept = part.trim_end_matches('0');
            let mut parts: Vec<String> =
                (kept.len().max(1)..=part.len()).map(|n| format!(r"\.{}", &part[..n])).collect();
            if kept.is_empty() {
                parts.push(String::new());
            }
            found.push(format!("(?:[1-9][0-9]*{whole}|{})(?:{})", trimmed(whole), parts.join("|")));
        }
    }
    Some(found.join("|"))
}

/// Texts of numbers that are at least a bound, with a sign in front where there is one.
fn at_least(bound: &Bound) -> String {
    let size = Decimal::new(false, &bound.at.whole, &bound.at.part);
    if bound.at.negative {
        return format!("[0-9].*|-(?:{})", up_to(&size, bound.open));
    }
    let zero = if bound.at.is_zero() && !bound.open { r"|-0(?:\.0+)?" } else { "" };
    format!("{}{zero}", from(&size, bound.open))
}

fn at_most(bound: &Bound) -> String {
    let size = Decimal::new(false, &bound.at.whole, &bound.at.part);
    if bound.at.negative {
        return format!("-(?:{})", from(&size, bound.open));
    }
    if bound.at.is_zero() && bound.open {
        return format!("-(?:{})", from(&size, true));
    }
    format!("-.*|{}", up_to(&size, bound.open))
}

/// Unsigned texts from `low` on.
fn from(low: &Decimal, open: bool) -> String {
    let Decimal { whole, part, .. } = low;
    let mut found = vec![format!(r"(?:{})(?:\.[0-9]+)?", whole_from(&up(whole)))];
    if part.is_empty() {
        found.push(if open { format!(r"{whole}\.[0-9]*[1-9][0-9]*") } else { format!(r"{whole}(?:\.[0-9]+)?") });
    } else {
        for (i, digit) in part.bytes().enumerate().filter(|&(_, d)| d < b'9') {
            found.push(format!(r"{whole}\.{}[{}-9][0-9]*", &part[..i], char::from(digit + 1)));
        }
        found.push(format!(r"{whole}\.{part}[0-9]*{}", if open { "[1-9][0-9]*" } else { "" }));
    }
    found.join("|")
}

/// Unsigned texts up to `high`, which is above zero where it is open.
fn up_to(high: &Decimal, open: bool) -> String {
    let Decimal { whole, part, .. } = high;
    let mut found = Vec::new();
    if whole != "0" {
        found.push(format!(r"(?:{})(?:\.[0-9]+)?", whole_to(&down(whole))));
    }
    if part.is_empty() {
        if !open {
            found.push(format!(r"{whole}(?:\.0+)?"));
        }
        return found.join("|");
    }
    found.push(whole.clone());
    for (i, digit) in part.bytes().enumerate() {
        if i > 0 {
            found.push(format!(r"{whole}\.{}", &part[..i]));
        }
        if digit > b'0' {
            found.push(format!(r"{whole}\.{}[0-{}][0-9]*", &part[..i], char::from(digit - 1)));
        }
    }
    if !open {
        found.push(format!(r"{whole}\.{part}0*"));
    }
    found.join("|")
}

fn whole_from(low: &str) -> String {
    if low == "0" {
        return WHOLE.into();
    }
    let n = low.len();
    let mut found = vec![low.to_string(), format!("[1-9][0-9]{{{n},}}")];
    for (i, digit) in low.bytes().enumerate().filter(|&(_, d)| d < b'9') {
        found.push(format!("{}[{}-9][0-9]{{{}}}", &low[..i], char::from(digit + 1), n - 1 - i));
    }
    found.join("|")
}

fn whole_to(high: &str) -> String {
    let n = high.len();
    let mut found = vec![high.to_string()];
    for (i, digit) in high.bytes().enumerate() {
        let least = if i == 0 && n > 1 { b'1' } else { b'0' };
        if digit > least {
            found.push(format!(
                "{}[{}-{}][0-9]{{{}}}",
                &high[..i],
                char::from(least),
                char::from(digit - 1),
                n - 1 - i
            ));
        }
    }
    if n > 1 {
        found.push(format!("0|[1-9][0-9]{{0,{}}}", n - 2));
    }
    found.join("|")
}

fn tighter(a: &Option<Bound>, b: &Option<Bound>, side: Ordering) -> Option<Bound> {
    let (Some(x), Some(y)) = (a, b) else { return a.clone().or_else(|| b.clone()) };
    let first = match x.at.cmp(&y.at) {
        Ordering::Equal => x.open,
        order => order == side,
    };
    Some(if first { x.clone() } else { y.clone() })
}

fn trimmed(digits: &str) -> String {
    let found = digits.trim_start_matches('0');
    if found.is_empty() { "0".into() } else { found.into() }
}

/// The number above.
fn up(whole: &str) -> String {
    let kept = whole.trim_end_matches('9');
    let zeros = "0".repeat(whole.len() - kept.len());
    match kept.as_bytes().last() {
        None => format!("1{zeros}"),
        Some(&digit) => format!("{}{}{zeros}", &kept[..kept.len() - 1], char::from(digit + 1)),
    }
}

/// The number below, of a number above zero.
fn down(whole: &str) -> String {
    let kept = whole.trim_end_matches('0');
    let nines = "9".repeat(whole.len() - kept.len());
    match kept.as_bytes().last() {
        None => "0".into(),
        Some(&digit) => trimmed(&format!("{}{}{nines}", &kept[..kept.len() - 1], char::from(digit - 1))),
    }
}

fn divisor(a: u128, b: u128) -> u128 {
    if b == 0 { a } else { divisor(b, a % b) }
}

fn escaped(number: &str) -> String {
    number.replace('.', r"\.").replace('+', r"\+")
}
