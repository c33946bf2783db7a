//! Makes a grammar in Lark's syntax from a JSON schema: rules of values, terminals of their texts.

use std::collections::{HashMap, VecDeque};

use llguidance::api::GrammarWithLexer;
use llguidance::regex_to_lark;
use serde_json::{Value, json};

use super::numbers::Told;
use super::reason::shown;
use super::schema::{Kind, List, Object, Places, Refusal, Schema};
use super::strings::{UNREACHED, quoted};
use super::term::Term;

/// Rules of one schema at most: llguidance goes through them by recursion.
const MAX_RULES: usize = 20_000;

/// Text between two tokens of JSON by default: a space, or a line break and the indentation behind it. More would let a
/// model that likes spaces never come to an end.
const WHITESPACE: &str = r" |\r?\n[ \t]{0,40}";

enum Symbol {
    Term(usize),
    Rule(usize),
    /// A grammar of its own, which counts remainders.
    Counted(usize),
    /// A rule several times.
    Times(usize, u64, Option<u64>),
}

type Line = Vec<Symbol>;

struct Rules<'a> {
    schema: Schema<'a>,
    rules: Vec<Vec<Line>>,
    terms: Vec<String>,
    known: HashMap<String, usize>,
    counted: Vec<Value>,
    of: HashMap<Places, usize>,
    open: VecDeque<(Places, usize)>,
}

/// A schema's grammar under a name, the grammars that it leads to, and about how many items the largest row of its
/// parser has.
pub(super) struct Written {
    pub(super) grammars: Vec<GrammarWithLexer>,
    pub(super) widest: usize,
}

/// The grammars of a schema, the first one under this name. Between two tokens of JSON stands `whitespace`, or what the
/// schema's `x-guidance` says, or what `usual` has.
pub(super) fn of_schema(
    mut schema: Value,
    whitespace: Option<&str>,
    usual: Option<&str>,
    name: &str,
) -> Result<Written, Refusal> {
    let told = schema.as_object_mut().and_then(|fields| fields.remove("x-guidance"));
    let mut usual = usual.unwrap_or(WHITESPACE);
    for (key, value) in told.iter().flat_map(Value::as_object).flatten() {
        usual = match (key.as_str(), value) {
            ("whitespace_pattern", Value::String(pattern)) => pattern,
            ("whitespace_flexible", Value::Bool(false)) => "",
            ("whitespace_flexible", Value::Bool(true)) => r"[ \t\r\n]+",
            _ => {
                let value = shown(value);
                return Err(format!(
                    "/x-guidance/{key} = {value}: is not supported; whitespace_pattern and whitespace_flexible are"
                ));
            }
        };
    }
    grammar(&schema, whitespace.unwrap_or(usual), name)
}

/// The grammar of a schema; between two tokens of JSON stands what the regular expression `whitespace` matches.
///
/// # Errors
/// A schema that is malformed, that nothing satisfies, or that says what is not enforced.
fn grammar(schema: &Value, whitespace: &str, name: &str) -> Result<Written, Refusal> {
    let mut rules = Rules {
        schema: Schema::new(schema),
        rules: Vec::new(),
        terms: Vec::new(),
        known: HashMap::new(),
        counted: Vec::new(),
        of: HashMap::new(),
        open: VecDeque::new(),
    };
    let start = rules.schema.start();
    let start = rules.value(start)?;
    while let Some((places, rule)) = rules.open.pop_front() {
        let lines = rules.lines(&places)?;
        rules.rules[rule] = lines;
    }
    let ends = rules.ends();
    if !ends[start] {
        return Err("no value satisfies it".into());
    }
    let text = rules.text(start, &ends, whitespace, name);
    let mut body = GrammarWithLexer::from_lark(text);
    body.name = Some(name.into());
    let mut grammars = vec![body];
    for (i, schema) in rules.counted.into_iter().enumerate() {
        let mut counted = GrammarWithLexer::from_json_schema(schema);
        counted.name = Some(format!("{name}-{i}"));
        grammars.push(counted);
    }
    let widest = rules.rules.len().min(2_000);
    Ok(Written { grammars, widest })
}

impl Rules<'_> {
    fn rule(&mut self, lines: Vec<Line>) -> Result<usize, Refusal> {
        if self.rules.len() >= MAX_RULES {
            return Err(format!("makes more than {MAX_RULES} rules"));
        }
        self.rules.push(lines);
        Ok(self.rules.len() - 1)
    }

    /// The rule of values for which all places hold.
    fn value(&mut self, places: Places) -> Result<usize, Refusal> {
        if let Some(&rule) = self.of.get(&places) {
            return Ok(rule);
        }
        let rule = self.rule(Vec::new())?;
        self.of.insert(places.clone(), rule);
        self.open.push_back((places, rule));
        Ok(rule)
    }

    fn term(&mut self, term: &Term) -> Symbol {
        let mut text = String::new();
        term.lark(&mut text);
        let next = self.terms.len();
        let id = *self.known.entry(text).or_insert_with_key(|text| {
            self.terms.push(text.clone());
            next
        });
        Symbol::Term(id)
    }

    fn sign(&mut self, sign: &str) -> Symbol {
        self.term(&Term::rx(sign))
    }

    fn lines(&mut self, places: &Places) -> Result<Vec<Line>, Refusal> {
        let path = self.schema.path(places);
        let placed = |why: String| if why.starts_with('/') { why } else { format!("{path}/{why}") };
        let (mut lines, mut texts) = (Vec::new(), Vec::new());
        for kind in self.schema.kinds(places)? {
            match kind {
                Kind::Null => texts.push(Term::rx("null")),
                Kind::Bool(value) => texts.push(Term::rx(value.to_string())),
                Kind::String(strings) => texts.extend(strings.told().map_err(placed)?),
                Kind::Number(numbers) => match numbers.told().map_err(placed)? {
                    Told::Never => {}
                    Told::Term(term) => texts.push(term),
                    Told::Counted { of, low, high } => lines.push(vec![self.remainders(of, low, high)]),
                },
                Kind::List(list) => self.list(&list, &mut lines).map_err(placed)?,
                Kind::Object(object) => self.object(&object, &mut lines).map_err(placed)?,
            }
        }
        if !texts.is_empty() {
            lines.push(vec![self.term(&Term::any(texts))]);
        }
        Ok(lines)
    }

    fn remainders(&mut self, of: u64, low: Option<i64>, high: Option<i64>) -> Symbol {
        let mut schema = json!({"type": "integer", "multipleOf": of});
        low.into_iter().for_each(|low| schema["minimum"] = low.into());
        high.into_iter().for_each(|high| schema["maximum"] = high.into());
        let found = self.counted.iter().position(|s| *s == schema).unwrap_or_else(|| {
            self.counted.push(schema);
            self.counted.len() - 1
        });
        Symbol::Counted(found)
    }

    fn list(&mut self, list: &List, lines: &mut Vec<Line>) -> Result<(), Refusal> {
        let most = list.most.filter(|&most| most < UNREACHED);
        let (least, own) = (list.least, list.first());
        if most.is_some_and(|most| most < least) {
            return Ok(());
        }
        if least == 0 {
            lines.push(vec![self.sign(r"\["), self.sign(r"\]")]);
        }
        if most == Some(0) {
            return Ok(());
        }
        // Behind the items with places of their own comes any number of others.
        let own = most.map_or(own, |most| own.min(most as usize));
        let other = self.value(list.item(list.first()))?;
        let comma = vec![self.sign(","), Symbol::Rule(other)];
        let (comma, first) = (self.rule(vec![comma])?, own.max(1));
        let left = most.map(|most| most - first as u64);
        let mut tail = self.rule(vec![vec![Symbol::Times(comma, least.saturating_sub(first as u64), left)]])?;
        if left == Some(0) {
            tail = self.rule(vec![Vec::new()])?;
        }
        // The schema's own items that may be left out, from the last one.
        let fixed = first.min(least.max(1) as usize);
        for i in (fixed..first).rev() {
            let item = self.value(list.item(i))?;
            let with = vec![self.sign(","), Symbol::Rule(item), Symbol::Rule(tail)];
            tail = self.rule(vec![with, Vec::new()])?;
        }
        let mut line = vec![self.sign(r"\[")];
        for i in 0..fixed {
            if i > 0 {
                line.push(self.sign(","));
            }
            line.push(Symbol::Rule(self.value(list.item(i))?));
        }
        line.extend([Symbol::Rule(tail), self.sign(r"\]")]);
        lines.push(line);
        Ok(())
    }

    /// Write members in the schema's order, those with free names behind them: a rule for each member that comes next
    /// and each number of members before it, as far as numbers matter.
    fn object(&mut self, object: &Object, lines: &mut Vec<Line>) -> Result<(), Refusal> {
        let names = object.names();
        let required = object.required.iter().collect::<std::collections::HashSet<_>>();
        let free = object.free(&names)?;
        let mut rest = Vec::new();
        for (term, places) in free {
            let value = self.value(places)?;
            rest.push(vec![self.term(&term), self.sign(":"), Symbol::Rule(value)]);
        }
        let rest = self.rule(rest)?;
        // A rule whose members none can be is left out below; whether one can be is asked here for `minProperties` alone.
        let open = self.schema_has_free(object, &names)?;
        let must = required.len() as u64;
        if open && object.least > must + 1 {
            return Err(format!(
                "minProperties = {}: is enforced for names that the schema declares; a name of another one might come twice. \
                 What works: additionalProperties false, or at least {} names required",
                object.least,
                object.least - 1
            ));
        }
        let most = object.most.filter(|&m| open || m < names.len() as u64).filter(|&m| m < UNREACHED);
        if most.is_some_and(|most| most < must.max(object.least)) {
            return Ok(());
        }
        let top = most.unwrap_or(0).max(object.least).max(1);
        let cells = (names.len() as u64 + 1).saturating_mul(top.min(names.len() as u64 + 1) + 1);
        if cells > MAX_RULES as u64 {
            return Err(format!("minProperties or maxProperties of {} names: make too many rules", names.len()));
        }
        let comma = vec![self.sign(","), Symbol::Rule(rest)];
        let comma = self.rule(vec![comma])?;
        // Behind all declared names, by how many members there are.
        let height = top.min(names.len() as u64);
        let mut next = Vec::new();
        for count in 0..=height {
            let left = most.map(|most| most - count.min(most));
            let lack = object.least.saturating_sub(count).min(2);
            let mut found = Vec::new();
            if count == 0 {
                if lack == 0 {
                    found.push(Vec::new());
                }
                if open && lack < 2 && left != Some(0) {
                    let more = left.map(|left| left - 1);
                    let mut line = vec![Symbol::Rule(rest)];
                    if more != Some(0) {
                        line.push(Symbol::Times(comma, 0, more));
                    }
                    found.push(line);
                }
            } else if !open || left == Some(0) {
                if lack == 0 {
                    found.push(Vec::new());
                }
            } else if lack < 2 {
                found.push(vec![Symbol::Times(comma, lack, left)]);
            }
            next.push(self.rule(found)?);
        }
        for name in names.iter().rev() {
            let value = self.value(object.member(name)?)?;
            let key = Term::rx(quoted(name));
            let mut row = Vec::new();
            for count in 0..=height {
                let more = (count + 1).min(height);
                let mut found = Vec::new();
                if most.is_none_or(|most| count < most) {
                    let mut line = Vec::new();
                    if count > 0 {
                        line.push(self.sign(","));
                    }
                    line.extend([self.term(&key), self.sign(":"), Symbol::Rule(value)]);
                    line.push(Symbol::Rule(next[more as usize]));
                    found.push(line);
                }
                if !required.contains(name) {
                    found.push(vec![Symbol::Rule(next[count as usize])]);
                }
                row.push(self.rule(found)?);
            }
            next = row;
        }
        lines.push(vec![self.sign(r"\{"), Symbol::Rule(next[0]), self.sign(r"\}")]);
        Ok(())
    }

    /// True if a member may have a name that is not declared, as far as its value's kinds tell.
    fn schema_has_free(&mut self, object: &Object, names: &[String]) -> Result<bool, Refusal> {
        for (_, places) in object.free(names)? {
            if !self.schema.kinds(&places)?.is_empty() {
                return Ok(true);
            }
        }
        Ok(false)
    }

    /// Rules from which a text can be made.
    fn ends(&self) -> Vec<bool> {
        let mut ends = vec![false; self.rules.len()];
        let (mut open, mut more) = ((0..self.rules.len()).collect::<Vec<_>>(), true);
        while more {
            let before = open.len();
            open.retain(|&i| {
                ends[i] = self.rules[i].iter().any(|line| line.iter().all(|symbol| ended(symbol, &ends)));
                !ends[i]
            });
            open.reverse(); // rules lead to earlier ones and to later ones
            more = open.len() < before;
        }
        ends
    }

    fn text(&self, start: usize, ends: &[bool], whitespace: &str, name: &str) -> String {
        let mut out = String::new();
        if !whitespace.is_empty() {
            out.push_str("%llguidance {\"ignore_once\": true}\n");
            out.push_str(&format!("%ignore /{}/\n", regex_to_lark(whitespace, "")));
        }
        out.push_str(&format!("start: r{start}\n"));
        let (mut seen, mut open) = (vec![false; self.rules.len()], vec![start]);
        let mut terms = vec![false; self.terms.len()];
        seen[start] = true;
        while let Some(rule) = open.pop() {
            out.push_str(&format!("r{rule}:"));
            let lines = self.rules[rule].iter().filter(|line| line.iter().all(|symbol| ended(symbol, ends)));
            for (i, line) in lines.enumerate() {
                out.push_str(if i == 0 { "" } else { " |" });
                let mut empty = true;
                for symbol in line {
                    let (next, text) = match *symbol {
                        Symbol::Term(id) => {
                            terms[id] = true;
                            (None, format!(" T{id}"))
                        }
                        Symbol::Rule(id) => (Some(id), format!(" r{id}")),
                        Symbol::Counted(id) => (None, format!(" @{name}-{id}")),
                        Symbol::Times(id, 0, _) if !ends[id] => continue,
                        Symbol::Times(id, 0, None) => (Some(id), format!(" r{id}*")),
                        Symbol::Times(id, low, None) => (Some(id), format!(" r{id}{{{low},}}")),
                        Symbol::Times(id, low, Some(high)) => (Some(id), format!(" r{id}{{{low},{high}}}")),
                    };
                    empty = false;
                    out.push_str(&text);
                    if let Some(next) = next.filter(|&next| !std::mem::replace(&mut seen[next], true)) {
                        open.push(next);
                    }
                }
                if empty {
                    out.push_str(" \"\"");
                }
            }
            out.push('\n');
        }
        for (id, term) in self.terms.iter().enumerate().filter(|&(id, _)| terms[id]) {
            out.push_str(&format!("T{id}: {term}\n"));
        }
        out
    }
}

fn ended(symbol: &Symbol, ends: &[bool]) -> bool {
    match *symbol {
        Symbol::Term(_) | Symbol::Counted(_) | Symbol::Times(_, 0, _) => true,
        Symbol::Rule(id) | Symbol::Times(id, _, _) => ends[id],
    }
}
