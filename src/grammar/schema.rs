//! Values that a JSON schema takes: for each type, the conditions on it.
//!
//! A place of the schema is a number here. What must hold of one value is a set of places, [`Places`], all of them at
//! once; [`Schema::kinds`] makes alternatives of that, one type each, whose parts are sets of places again. So schemas
//! meet (`allOf`, `$ref` beside other keywords, `patternProperties`) without being copied, and recursive ones come to an
//! end: there are finitely many sets.

use std::collections::{BTreeSet, HashMap};
use std::rc::Rc;

use serde_json::{Map, Value};

use super::numbers::{Bound, Decimal, Multiple, Numbers, Told};
use super::reason::{shown, step};
use super::strings::{self, Strings};
use super::term::Term;

/// Reason why a schema is refused.
pub(super) type Refusal = String;
/// Places that all hold for a value; without places, any value does.
pub(super) type Places = BTreeSet<usize>;

/// Alternatives that are looked at for one schema, at most.
const MAX_KINDS: usize = 200_000;
/// `allOf`, `anyOf`, `oneOf` and `$ref` within each other, at most.
const MAX_WITHIN: usize = 200;
/// Lengths and counts from below, at most.
const MAX_LEAST: u64 = 100_000;
/// Depth to which two objects are compared, to tell the options of a `oneOf` apart.
const MAX_APART: usize = 8;

static NOTHING: Value = Value::Bool(false);

/// Keywords that are not enforced and refused.
const REFUSED: [&str; 17] = [
    "not",
    "if",
    "then",
    "else",
    "contains",
    "minContains",
    "maxContains",
    "propertyNames",
    "dependentRequired",
    "dependentSchemas",
    "dependencies",
    "unevaluatedItems",
    "unevaluatedProperties",
    "uniqueItems",
    "$dynamicRef",
    "$recursiveRef",
    "extends",
];

/// Values of one type.
#[derive(Debug, Clone, PartialEq)]
pub(super) enum Kind {
    Null,
    Bool(bool),
    Number(Numbers),
    String(Strings),
    List(List),
    Object(Object),
}

/// Conditions on an array, over all layers.
#[derive(Debug, Clone, PartialEq, Default)]
pub(super) struct List {
    layers: Vec<Rc<Items>>,
    pub(super) least: u64,
    pub(super) most: Option<u64>,
}

#[derive(Debug, PartialEq)]
struct Items {
    first: Vec<usize>,
    rest: Option<usize>,
}

impl List {
    /// Items that have places of their own.
    pub(super) fn first(&self) -> usize {
        self.layers.iter().map(|l| l.first.len()).max().unwrap_or(0)
    }

    pub(super) fn item(&self, i: usize) -> Places {
        self.layers.iter().filter_map(|l| l.first.get(i).copied().or(l.rest)).collect()
    }
}

/// Conditions on an object, over all layers.
#[derive(Debug, Clone, PartialEq, Default)]
pub(super) struct Object {
    layers: Vec<Rc<Fields>>,
    pub(super) required: Vec<String>,
    pub(super) least: u64,
    pub(super) most: Option<u64>,
}

#[derive(Debug, PartialEq)]
struct Fields {
    named: Vec<(String, usize)>,
    index: HashMap<String, usize>,
    patterns: Vec<(Term, usize)>,
    rest: Option<usize>,
}

impl Object {
    /// Names that the schema has, in its order; behind them those that are only required.
    pub(super) fn names(&self) -> Vec<String> {
        let mut seen = std::collections::HashSet::new();
        let named = self.layers.iter().flat_map(|l| l.named.iter().map(|(name, _)| name)).chain(&self.required);
        named.filter(|name| seen.insert(name.as_str())).cloned().collect()
    }

    /// The places that hold for a member, by its name.
    pub(super) fn member(&self, name: &str) -> Result<Places, Refusal> {
        let json = Value::from(name).to_string();
        let mut found = Places::new();
        for layer in &self.layers {
            let mut declared = false;
            if let Some(&i) = layer.index.get(name) {
                (declared, _) = (true, found.insert(layer.named[i].1));
            }
            for (pattern, place) in &layer.patterns {
                if pattern.has(&json).map_err(|why| format!("patternProperties: {why}"))? {
                    (declared, _) = (true, found.insert(*place));
                }
            }
            if !declared {
                found.extend(layer.rest);
            }
        }
        Ok(found)
    }

    /// Names that are not declared: each set of them with what holds of its members.
    pub(super) fn free(&self, names: &[String]) -> Result<Vec<(Term, Places)>, Refusal> {
        let any = Term::rx(format!("\"{}*\"", strings::CHARACTER));
        let mut all = vec![any];
        if !names.is_empty() {
            let taken = names.iter().map(|n| Term::rx(strings::quoted(n))).collect();
            all.push(Term::not(Term::any(taken)));
        }
        let mut sets = vec![(all, Places::new())];
        for layer in &self.layers {
            let mut split = Vec::new();
            for (terms, places) in sets {
                // (terms, places, whether a pattern of this layer has it)
                let mut cases = vec![(terms, places, false)];
                for (pattern, place) in &layer.patterns {
                    let mut next = Vec::new();
                    for (terms, places, has) in cases {
                        let mut within = (terms.clone(), places.clone(), true);
                        within.0.push(pattern.clone());
                        within.1.insert(*place);
                        let mut without = (terms, places, has);
                        without.0.push(Term::not(pattern.clone()));
                        for case in [within, without] {
                            let empty = Term::all(case.0.clone()).is_empty();
                            if !empty.map_err(|why| format!("patternProperties: {why}"))? {
                                next.push(case);
                            }
                        }
                    }
                    if next.len() > 64 {
                        return Err("patternProperties: more than 64 sets of names that several patterns have".into());
                    }
                    cases = next;
                }
                split.extend(cases.into_iter().map(|(terms, mut places, has)| {
                    if !has {
                        places.extend(layer.rest);
                    }
                    (terms, places)
                }));
            }
            sets = split;
        }
        Ok(sets.into_iter().map(|(terms, places)| (Term::all(terms), places)).collect())
    }
}

struct Place<'a> {
    value: &'a Value,
    /// True if the value itself is the constant that is asked for.
    constant: bool,
    path: String,
}

/// A schema, and the findings about it.
pub(super) struct Schema<'a> {
    root: &'a Value,
    places: Vec<Place<'a>>,
    known: HashMap<(usize, bool), usize>,
    found: HashMap<usize, Rc<Vec<Kind>>>,
    within: Vec<usize>,
    spent: usize,
}

impl<'a> Schema<'a> {
    pub(super) fn new(root: &'a Value) -> Self {
        Self { root, places: Vec::new(), known: HashMap::new(), found: HashMap::new(), within: Vec::new(), spent: 0 }
    }

    pub(super) fn start(&mut self) -> Places {
        Places::from([self.place(self.root, false, String::new())])
    }

    fn place(&mut self, value: &'a Value, constant: bool, path: String) -> usize {
        let key = (std::ptr::from_ref(value) as usize, constant);
        *self.known.entry(key).or_insert_with(|| {
            self.places.push(Place { value, constant, path });
            self.places.len() - 1
        })
    }

    /// The first of the places, as refusals name it.
    pub(super) fn path(&self, places: &Places) -> String {
        places.first().map_or_else(String::new, |&place| self.places[place].path.clone())
    }

    fn spend(&mut self, kinds: usize) -> Result<(), Refusal> {
        self.spent += kinds;
        match self.spent > MAX_KINDS {
            true => Err(format!("/: its alternatives are too many together; at most {MAX_KINDS}")),
            false => Ok(()),
        }
    }

    /// The kinds of values for which all places hold.
    pub(super) fn kinds(&mut self, places: &Places) -> Result<Vec<Kind>, Refusal> {
        let mut found = any();
        for &place in places {
            let kinds = self.kinds_of(place)?;
            found = self.both(&found, &kinds, place)?;
        }
        Ok(found)
    }

    fn both(&mut self, a: &[Kind], b: &[Kind], place: usize) -> Result<Vec<Kind>, Refusal> {
        self.spend(a.len() * b.len())?;
        let mut found: Vec<Kind> = Vec::new();
        for kind in a {
            for other in b {
                let met = meet(kind, other).map_err(|why| format!("{}/{why}", self.places[place].path))?;
                if let Some(met) = met
                    && !found.contains(&met)
                {
                    self.spend(1)?;
                    found.push(met);
                }
            }
        }
        Ok(found)
    }

    fn kinds_of(&mut self, place: usize) -> Result<Rc<Vec<Kind>>, Refusal> {
        if let Some(found) = self.found.get(&place) {
            return Ok(found.clone());
        }
        let Place { value, constant, ref path } = self.places[place];
        if self.within.contains(&place) || self.within.len() >= MAX_WITHIN {
            return Err(format!("{path}/$ref: leads to itself, or through more than {MAX_WITHIN} schemas"));
        }
        self.within.push(place);
        let found = match (constant, value) {
            (true, _) => vec![self.constant(value, place)?],
            (false, Value::Bool(true)) => any(),
            (false, Value::Bool(false)) => Vec::new(),
            (false, Value::Object(fields)) => self.of_keywords(fields, place)?,
            _ => return Err(format!("{path} = {}: a schema is an object, true or false", shown(value))),
        };
        self.within.pop();
        self.spend(found.len() + 1)?;
        Ok(self.found.entry(place).or_insert_with(|| Rc::new(found)).clone())
    }

    /// The kind that has one value alone.
    fn constant(&mut self, value: &'a Value, place: usize) -> Result<Kind, Refusal> {
        let path = self.places[place].path.clone();
        Ok(match value {
            Value::Null => Kind::Null,
            Value::Bool(b) => Kind::Bool(*b),
            Value::Number(n) => {
                let text = n.to_string();
                let decimal =
                    Decimal::parse(&text).ok_or_else(|| format!("{path} = {}: has too many digits", shown(value)))?;
                Kind::Number(Numbers { listed: Some(vec![(text, decimal)]), ..Numbers::default() })
            }
            Value::String(s) => Kind::String(Strings { listed: Some(vec![s.clone()]), ..Strings::default() }),
            Value::Array(items) => {
                let first: Vec<usize> = items.iter().map(|item| self.place(item, true, path.clone())).collect();
                let count = first.len() as u64;
                Kind::List(List { layers: vec![Rc::new(Items { first, rest: None })], least: count, most: Some(count) })
            }
            Value::Object(members) => {
                let named = members.iter().map(|(k, v)| (k.clone(), self.place(v, true, path.clone()))).collect();
                let rest = Some(self.place(&NOTHING, false, path));
                let required = members.keys().cloned().collect();
                let layers = vec![Rc::new(fields(named, Vec::new(), rest))];
                Kind::Object(Object { layers, required, least: 0, most: None })
            }
        })
    }

    fn of_keywords(&mut self, fields: &'a Map<String, Value>, place: usize) -> Result<Vec<Kind>, Refusal> {
        let path = self.places[place].path.clone();
        let refused =
            |keyword: &str, value: &Value, why: &str| Err(format!("{path}/{keyword} = {}: {why}", shown(value)));
        if let Some((keyword, value)) = fields
            .iter()
            .find(|(k, v)| REFUSED.contains(&k.as_str()) && !(k.as_str() == "uniqueItems" && **v == Value::Bool(false)))
        {
            return refused(keyword, value, "is not enforced; leave it out, and look at the output");
        }
        let mut found = self.typed(fields, &path)?;
        if let Some(value) = fields.get("const") {
            let constant = self.place(value, true, format!("{path}/const"));
            let kinds = self.kinds_of(constant)?;
            found = self.both(&found, &kinds, place)?;
        }
        if let Some(value) = fields.get("enum") {
            let Some(values) = value.as_array() else { return refused("enum", value, "must be a list of values") };
            let (mut texts, mut numbers, mut kinds) = (Vec::new(), Vec::new(), Vec::new());
            for value in values {
                let constant = self.place(value, true, format!("{path}/enum"));
                match self.constant(value, constant)? {
                    Kind::String(one) => texts.extend(one.listed.into_iter().flatten()),
                    Kind::Number(one) => numbers.extend(one.listed.into_iter().flatten()),
                    kind => kinds.push(kind),
                }
            }
            if !texts.is_empty() {
                kinds.push(Kind::String(Strings { listed: Some(texts), ..Strings::default() }));
            }
            if !numbers.is_empty() {
                kinds.push(Kind::Number(Numbers { listed: Some(numbers), ..Numbers::default() }));
            }
            found = self.both(&found, &kinds, place)?;
        }
        if let Some(value) = fields.get("$ref") {
            let Some(target) = value.as_str() else { return refused("$ref", value, "must be a text") };
            let Some(target_value) = pointed(self.root, target) else {
                return refused("$ref", value, "must lead to a place of this schema, as #/$defs/name does");
            };
            let target = self.place(target_value, false, target.trim_start_matches('#').to_string());
            let kinds = self.kinds_of(target)?;
            found = self.both(&found, &kinds, place)?;
        }
        for keyword in ["allOf", "anyOf", "oneOf"] {
            let Some(value) = fields.get(keyword) else { continue };
            let Some(options) = value.as_array().filter(|o| !o.is_empty()) else {
                return refused(keyword, value, "must be a list of schemas, one at least");
            };
            let mut united: Vec<Kind> = Vec::new();
            let mut apart: Vec<Vec<Kind>> = Vec::new();
            for (i, option) in options.iter().enumerate() {
                let option = self.place(option, false, format!("{path}/{keyword}/{i}"));
                let kinds = self.kinds_of(option)?;
                let met = self.both(&found, &kinds, place)?;
                match keyword {
                    "allOf" => found = met,
                    "anyOf" => united.extend(met.into_iter().filter(|k| !united.contains(k)).collect::<Vec<_>>()),
                    _ => {
                        for (j, other) in apart.iter().enumerate() {
                            self.spend(other.len() * met.len())?;
                            for (a, b) in other.iter().flat_map(|a| met.iter().map(move |b| (a, b))) {
                                if !self.apart(a, b, 0)? {
                                    let why = format!(
                                        "options {j} and {i} may both hold; what works is anyOf, or options of \
                                                       different types or with a constant member that both require"
                                    );
                                    return refused(keyword, value, &why);
                                }
                            }
                        }
                        apart.push(met);
                    }
                }
            }
            match keyword {
                "anyOf" => found = united,
                "oneOf" => found = apart.concat(),
                _ => {}
            }
        }
        Ok(found)
    }

    /// The kinds that `type` and the keywords of each type allow.
    fn typed(&mut self, fields: &'a Map<String, Value>, path: &str) -> Result<Vec<Kind>, Refusal> {
        let all = Value::from(vec!["null", "boolean", "number", "string", "array", "object"]);
        let told = fields.get("type").unwrap_or(&all);
        let names: Vec<&str> = match told {
            Value::String(name) => vec![name],
            Value::Array(names) => names.iter().filter_map(Value::as_str).collect(),
            _ => Vec::new(),
        };
        let mut found = Vec::new();
        let (mut numbers, mut seen) = (None, Vec::new());
        for name in names {
            if seen.contains(&name) {
                continue;
            }
            seen.push(name);
            match name {
                "null" => found.push(Kind::Null),
                "boolean" => found.extend([Kind::Bool(true), Kind::Bool(false)]),
                "number" => numbers = Some(false),
                "integer" => numbers = numbers.or(Some(true)),
                "string" => found.push(Kind::String(of_strings(fields, path)?)),
                "array" => found.push(Kind::List(self.of_lists(fields, path)?)),
                "object" => found.push(Kind::Object(self.of_objects(fields, path)?)),
                _ => return Err(format!("{path}/type = {name:?}: is no type of JSON")),
            }
        }
        if let Some(whole) = numbers {
            found.push(Kind::Number(of_numbers(fields, path, whole)?));
        }
        match found.is_empty() {
            true => Err(format!("{path}/type = {}: must be a type of JSON, or a list of some", shown(told))),
            false => Ok(found),
        }
    }

    fn of_lists(&mut self, fields: &'a Map<String, Value>, path: &str) -> Result<List, Refusal> {
        let (least, most) = (least(fields, "minItems", path)?, count(fields, "maxItems", path)?);
        let (first, rest, name) = match fields.get("items") {
            Some(Value::Array(_)) => (fields.get("items"), fields.get("additionalItems"), "items"),
            items => (fields.get("prefixItems"), items, "prefixItems"),
        };
        let first = match first {
            None => Vec::new(),
            Some(Value::Array(first)) => {
                first.iter().enumerate().map(|(i, s)| self.place(s, false, format!("{path}/{name}/{i}"))).collect()
            }
            Some(other) => return Err(format!("{path}/{name} = {}: must be a list of schemas", shown(other))),
        };
        let rest = rest.map(|s| self.place(s, false, format!("{path}/items")));
        let bare = first.is_empty() && rest.is_none();
        let layers = if bare { Vec::new() } else { vec![Rc::new(Items { first, rest })] };
        Ok(List { layers, least, most })
    }

    fn of_objects(&mut self, fields_: &'a Map<String, Value>, path: &str) -> Result<Object, Refusal> {
        let schemas = |keyword: &str| match fields_.get(keyword) {
            None => Ok(None),
            Some(Value::Object(schemas)) => Ok(Some(schemas)),
            Some(other) => Err(format!("{path}/{keyword} = {}: must be an object of schemas", shown(other))),
        };
        let mut named = Vec::new();
        for (name, schema) in schemas("properties")?.into_iter().flatten() {
            named.push((name.clone(), self.place(schema, false, format!("{path}/properties/{}", step(name)))));
        }
        let mut patterns = Vec::new();
        for (text, schema) in schemas("patternProperties")?.into_iter().flatten() {
            let at = format!("{path}/patternProperties/{}", step(text));
            let pattern = strings::pattern(text).map_err(|why| format!("{at}: {why}"))?;
            patterns.push((pattern, self.place(schema, false, at)));
        }
        let rest = fields_.get("additionalProperties");
        let rest = rest.map(|s| self.place(s, false, format!("{path}/additionalProperties")));
        let mut required = Vec::new();
        if let Some(value) = fields_.get("required").filter(|v| !v.is_boolean()) {
            let names = value.as_array().filter(|names| names.iter().all(Value::is_string));
            let names = names.ok_or_else(|| format!("{path}/required = {}: must be a list of names", shown(value)))?;
            required.extend(names.iter().filter_map(Value::as_str).map(str::to_string));
        }
        let (least, most) =
            (count(fields_, "minProperties", path)?.unwrap_or(0), count(fields_, "maxProperties", path)?);
        let bare = named.is_empty() && patterns.is_empty() && rest.is_none();
        let layers = if bare { Vec::new() } else { vec![Rc::new(fields(named, patterns, rest))] };
        Ok(Object { layers, required, least, most })
    }

    /// True if no value can be both.
    fn apart(&mut self, a: &Kind, b: &Kind, depth: usize) -> Result<bool, Refusal> {
        self.spend(1)?;
        let (one, other) = match (a, b) {
            (Kind::Number(x), Kind::Number(y)) => {
                let met = x.meet(y).and_then(|met| met.told());
                return Ok(met == Ok(Told::Never)); // values that cannot be told count as not apart
            }
            (Kind::String(x), Kind::String(y)) => return Ok(x.meet(y).told() == Ok(None)),
            (Kind::Bool(x), Kind::Bool(y)) => return Ok(x != y),
            (Kind::List(x), Kind::List(y)) => {
                let beyond = |x: &List, y: &List| y.most.is_some_and(|most| x.least > most);
                if beyond(x, y) || beyond(y, x) {
                    return Ok(true);
                }
                let shared = x.least.max(y.least).min(x.first().max(y.first()) as u64) as usize;
                for i in 0..shared {
                    if self.sets_apart(&x.item(i), &y.item(i), depth)? {
                        return Ok(true);
                    }
                }
                return Ok(false);
            }
            (Kind::Object(x), Kind::Object(y)) => (x, y),
            _ => return Ok(a != b),
        };
        for name in one.required.iter().chain(&other.required) {
            let (x, y) = (one.member(name)?, other.member(name)?);
            if self.sets_apart(&x, &y, depth)? {
                return Ok(true);
            }
        }
        Ok(false)
    }

    fn sets_apart(&mut self, a: &Places, b: &Places, depth: usize) -> Result<bool, Refusal> {
        if depth >= MAX_APART {
            return Ok(false);
        }
        let (a, b) = (self.kinds(a)?, self.kinds(b)?);
        for x in &a {
            for y in &b {
                if !self.apart(x, y, depth + 1)? {
                    return Ok(false);
                }
            }
        }
        Ok(true)
    }
}

fn any() -> Vec<Kind> {
    vec![
        Kind::Null,
        Kind::Bool(true),
        Kind::Bool(false),
        Kind::Number(Numbers::default()),
        Kind::String(Strings::default()),
        Kind::List(List::default()),
        Kind::Object(Object::default()),
    ]
}

fn meet(a: &Kind, b: &Kind) -> Result<Option<Kind>, String> {
    let fewer = |a: Option<u64>, b: Option<u64>| a.into_iter().chain(b).min();
    fn layered<T: PartialEq>(a: &[Rc<T>], b: &[Rc<T>]) -> Vec<Rc<T>> {
        a.iter().chain(b.iter().filter(|l| !a.contains(l))).cloned().collect()
    }
    Ok(Some(match (a, b) {
        (Kind::Null, Kind::Null) => Kind::Null,
        (Kind::Bool(x), Kind::Bool(y)) if x == y => Kind::Bool(*x),
        (Kind::Number(x), Kind::Number(y)) => Kind::Number(x.meet(y)?),
        (Kind::String(x), Kind::String(y)) => Kind::String(x.meet(y)),
        (Kind::List(x), Kind::List(y)) => Kind::List(List {
            layers: layered(&x.layers, &y.layers),
            least: x.least.max(y.least),
            most: fewer(x.most, y.most),
        }),
        (Kind::Object(x), Kind::Object(y)) => {
            let more = y.required.iter().filter(|n| !x.required.contains(n));
            Kind::Object(Object {
                layers: layered(&x.layers, &y.layers),
                required: x.required.iter().chain(more).cloned().collect(),
                least: x.least.max(y.least),
                most: fewer(x.most, y.most),
            })
        }
        _ => return Ok(None),
    }))
}

fn fields(named: Vec<(String, usize)>, patterns: Vec<(Term, usize)>, rest: Option<usize>) -> Fields {
    let index = named.iter().enumerate().map(|(i, (name, _))| (name.clone(), i)).collect();
    Fields { named, index, patterns, rest }
}

fn of_numbers(fields: &Map<String, Value>, path: &str, whole: bool) -> Result<Numbers, Refusal> {
    let number = |keyword: &str| match fields.get(keyword) {
        None | Some(Value::Bool(false)) => Ok(None),
        Some(value @ Value::Number(n)) => match Decimal::parse(&n.to_string()) {
            Some(number) => Ok(Some(number)),
            None => Err(format!("{path}/{keyword} = {}: has too many digits; at most 400", shown(value))),
        },
        Some(value) => Err(format!("{path}/{keyword} = {}: must be a number", shown(value))),
    };
    let side = |closed: &str, open: &str, order: std::cmp::Ordering| -> Result<Option<Bound>, Refusal> {
        let limit = number(closed)?;
        if fields.get(open) == Some(&Value::Bool(true)) {
            return Ok(limit.map(|at| Bound { at, open: true })); // draft 4's
        }
        Ok(match (limit, number(open)?) {
            (Some(a), Some(b)) if a.cmp(&b) == order => Some(Bound { at: a, open: false }),
            (_, Some(b)) => Some(Bound { at: b, open: true }),
            (a, None) => a.map(|at| Bound { at, open: false }),
        })
    };
    let low = side("minimum", "exclusiveMinimum", std::cmp::Ordering::Greater)?;
    let high = side("maximum", "exclusiveMaximum", std::cmp::Ordering::Less)?;
    let multiple = match number("multipleOf")? {
        None => None,
        Some(of) => Some(Multiple::new(&of).ok_or_else(|| {
            format!("{path}/multipleOf = {}: must not be 0, nor have more than 18 digits", shown(&fields["multipleOf"]))
        })?),
    };
    Ok(Numbers { whole, low, high, multiple, listed: None })
}

fn of_strings(fields: &Map<String, Value>, path: &str) -> Result<Strings, Refusal> {
    let text = |keyword: &str| match fields.get(keyword) {
        None => Ok(None),
        Some(Value::String(text)) => Ok(Some(text)),
        Some(other) => Err(format!("{path}/{keyword} = {}: must be a text", shown(other))),
    };
    let mut patterns = Vec::new();
    if let Some(pattern) = text("pattern")? {
        let refused = |why| format!("{path}/pattern = {}: {why}", shown(&fields["pattern"]));
        patterns.push(strings::pattern(pattern).map_err(refused)?);
    }
    if let Some(format) = text("format")? {
        let known = strings::format(format);
        patterns.extend(known.ok_or_else(|| {
            format!("{path}/format = {format:?}: is not enforced; those that are: {}", strings::FORMATS)
        })?);
    }
    let (shortest, longest) = (least(fields, "minLength", path)?, count(fields, "maxLength", path)?);
    Ok(Strings { shortest, longest, patterns, listed: None })
}

/// A length or a count; a number beyond all others is the largest one.
fn count(fields: &Map<String, Value>, keyword: &str, path: &str) -> Result<Option<u64>, Refusal> {
    let Some(value) = fields.get(keyword) else { return Ok(None) };
    let refused = || format!("{path}/{keyword} = {}: must be a whole number, at least 0", shown(value));
    let number = value.as_number().ok_or_else(refused)?;
    let number = Decimal::parse(&number.to_string()).ok_or_else(refused)?;
    number.count().map(Some).ok_or_else(refused)
}

fn least(fields: &Map<String, Value>, keyword: &str, path: &str) -> Result<u64, Refusal> {
    match count(fields, keyword, path)? {
        Some(n) if n > MAX_LEAST => Err(format!("{path}/{keyword} = {}: at most {MAX_LEAST}", shown(&fields[keyword]))),
        found => Ok(found.unwrap_or(0)),
    }
}

/// The value that a reference within a document leads to.
fn pointed<'a>(root: &'a Value, reference: &str) -> Option<&'a Value> {
    let pointer = reference.strip_prefix('#')?;
    let mut bytes = Vec::new();
    let mut rest = pointer.as_bytes();
    while let [first, more @ ..] = rest {
        rest = more;
        if *first == b'%' {
            let digits = std::str::from_utf8(rest.get(..2)?).ok()?;
            bytes.push(u8::from_str_radix(digits, 16).ok()?);
            rest = &rest[2..];
        } else {
            bytes.push(*first);
        }
    }
    let pointer = String::from_utf8(bytes).ok()?;
    root.pointer(if pointer == "/" { "" } else { &pointer })
}
