//! [`Arrays`]: the named arrays that a format derives from a plan, and where they are written.
//!
//! A format states its arrays once ([`Spec`]) and opens those of a phase together, by size. All sizes are compared with
//! all capacities before the first element is written, so that a batch that does not fit leaves every array as it was.
//! The memory is specrs's own, which grows to the largest size seen and never beyond the capacity that the geometry
//! states, or a caller's ([`Memory`]), which never grows.
//!
//! Sizes and capacities are both [`Extent`]s of the same [`Load`](crate::plan::Load) arithmetic.

use std::fmt;

use crate::error::{Error, Result};
use crate::plan::buf::{Poison, grow};

/// Element type of an array.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum DType {
    /// 32-bit signed integers.
    I32,
    /// 64-bit signed integers.
    I64,
    /// Bytes that are 0 or 1, one an element.
    Bool,
    /// Bytes.
    U8,
}

impl DType {
    /// Bytes of an element.
    pub fn size(self) -> usize {
        match self {
            DType::I32 => 4,
            DType::I64 => 8,
            DType::Bool | DType::U8 => 1,
        }
    }

    /// Name: `int32`, `int64`, `bool`, `uint8`.
    pub fn name(self) -> &'static str {
        match self {
            DType::I32 => "int32",
            DType::I64 => "int64",
            DType::Bool => "bool",
            DType::U8 => "uint8",
        }
    }
}

/// One array of a format.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Spec {
    /// Name, that of the kernel's argument.
    pub name: &'static str,
    /// Element type.
    pub dtype: DType,
    /// True if a caller may leave it out; it is then not written.
    pub optional: bool,
}

impl Spec {
    /// An array that must be there.
    pub const fn new(name: &'static str, dtype: DType) -> Self {
        Self { name, dtype, optional: false }
    }

    /// An array that a caller may leave out.
    pub const fn optional(name: &'static str, dtype: DType) -> Self {
        Self { name, dtype, optional: true }
    }
}

/// Size of an array, in elements.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Extent {
    /// One dimension.
    Line(u64),
    /// Rows of columns, row-major. In memory of a caller the rows may be longer than what is used of them.
    Table {
        /// Rows.
        rows: u64,
        /// Columns used.
        cols: u64,
    },
}

impl Extent {
    /// Elements.
    pub fn elements(self) -> u64 {
        match self {
            Extent::Line(n) => n,
            Extent::Table { rows, cols } => rows.saturating_mul(cols),
        }
    }

    /// Sizes of the dimensions.
    pub fn shape(self) -> Vec<u64> {
        match self {
            Extent::Line(n) => vec![n],
            Extent::Table { rows, cols } => vec![rows, cols],
        }
    }
}

/// Memory that a caller lends for an array; nobody else writes it while an [`Arrays`] holds it.
pub trait Memory: Send + Sync + fmt::Debug {
    /// The bytes.
    fn bytes(&self) -> &[u8];
    /// The bytes, to write.
    fn bytes_mut(&mut self) -> &mut [u8];
    /// True if every byte is known to be 0, so that clearing them again would only touch memory.
    fn is_zeroed(&self) -> bool {
        false
    }
}

/// An array of fixed capacity for [`Arrays::fixed`].
#[derive(Debug)]
pub struct Given {
    /// Memory of the array, of `extent.elements()` elements, aligned to the element type.
    pub memory: Box<dyn Memory>,
    /// Capacity of the array. For a table the columns are the distance of two rows.
    pub extent: Extent,
}

/// Memory that a lowering needs of one array.
#[derive(Debug, Clone, Copy)]
pub struct Need {
    /// Index of the array in [`Format::arrays`](crate::plan::Format::arrays).
    pub array: usize,
    /// Size that will be written.
    pub used: Extent,
    /// Capacity that the geometry states for it; memory of a caller may be smaller.
    pub limit: Extent,
}

/// An element of an array.
pub trait Element: bytemuck::Pod + Poison {
    #[doc(hidden)]
    fn of(store: &mut Store) -> Option<&mut Vec<Self>>;
    /// True if it is an element of arrays of `dtype`.
    fn is(dtype: DType) -> bool;
}

/// Memory of an array.
#[derive(Debug)]
#[doc(hidden)]
pub enum Store {
    I32(Vec<i32>),
    I64(Vec<i64>),
    U8(Vec<u8>),
    Given(Given),
}

macro_rules! element {
    ($t:ty, $variant:ident, $($dtype:ident)|+) => {
        impl Element for $t {
            fn is(dtype: DType) -> bool {
                matches!(dtype, $(DType::$dtype)|+)
            }
            fn of(store: &mut Store) -> Option<&mut Vec<Self>> {
                match store {
                    Store::$variant(data) => Some(data),
                    _ => None,
                }
            }
        }
    };
}
element!(i32, I32, I32);
element!(i64, I64, I64);
element!(u8, U8, Bool | U8);

#[derive(Debug)]
struct Column {
    spec: &'static Spec,
    store: Option<Store>,
    /// Extent that the last lowering wrote; `None` if the phase has no such array.
    used: Option<Extent>,
    /// Distance of two rows of a table, in elements.
    width: u64,
    /// `marks[row]` of a table in fixed memory: how many leading columns the last write may have left non-zero.
    marks: Vec<u32>,
}

/// The arrays of one format, by name.
///
/// The default has none.
#[derive(Debug, Default)]
pub struct Arrays {
    columns: Vec<Column>,
    generation: u64,
    poison: bool,
}

/// An array as it was last written.
#[derive(Debug, Clone, Copy)]
pub struct ArrayRef<'a> {
    /// Name and element type.
    pub spec: &'static Spec,
    /// All bytes from the first used element to the last one.
    pub bytes: &'a [u8],
    /// Extent that is used.
    pub extent: Extent,
    /// Distance of two rows of a table, in elements; 1 for a line.
    pub width: u64,
}

/// An opened array: exactly as long as the write needs, or all rows of a table in fixed memory.
#[derive(Debug)]
pub struct View<'a> {
    spec: &'static Spec,
    store: Option<&'a mut Store>,
    elements: usize,
    /// Held by reference: a flag among words is moved in pieces, for which the next reader waits.
    poison: &'a bool,
    /// Distance of two rows of a table, in elements; 1 for a line.
    pub width: usize,
    /// `marks[row]` of a table in fixed memory, for each row of its capacity: how many leading columns an earlier write
    /// may have left non-zero. The writer clears those that it does not overwrite, in the rows behind those in use too,
    /// and updates the marks. Marks do not count writes of others: everything that a plan states is written in full.
    /// Empty for memory that is written in full.
    pub marks: &'a mut [u32],
}

impl<'a> View<'a> {
    /// An array that the phase does not have.
    #[inline]
    fn absent() -> Self {
        static ABSENT: Spec = Spec::optional("absent", DType::U8);
        Self { spec: &ABSENT, store: None, elements: 0, poison: &false, width: 1, marks: &mut [] }
    }

    /// True if the array is there (an optional one may have been left out by the caller).
    pub fn is_present(&self) -> bool {
        self.store.is_some()
    }

    /// The elements, to write all of them.
    ///
    /// # Errors
    /// [`Error::Mismatch`] for another element type than the array's, or memory that is not aligned to it.
    pub fn slice<T: Element>(self) -> Result<&'a mut [T]> {
        let Self { spec, store, elements, poison, .. } = self;
        let mismatch = |got: String| Error::Mismatch {
            operand: spec.name,
            got,
            want: format!("{elements} elements of {}", std::any::type_name::<T>()),
        };
        let data: &mut [T] = match store {
            None => &mut [],
            // A caller's bytes do not tell their type.
            Some(_) if !T::is(spec.dtype) => return Err(mismatch(format!("an array of {}", spec.dtype.name()))),
            Some(Store::Given(given)) => bytemuck::try_cast_slice_mut(given.memory.bytes_mut())
                .map_err(|e| mismatch(format!("memory that does not fit: {e}")))?,
            Some(own) => T::of(own).ok_or_else(|| mismatch("an array of another element type".into()))?,
        };
        let have = data.len();
        let data = match elements {
            _ if data.is_empty() => data,
            n => data.get_mut(..n).ok_or_else(|| mismatch(format!("{have} elements")))?,
        };
        if *poison {
            data.fill(T::POISON);
        }
        Ok(data)
    }
}

impl Arrays {
    /// Arrays in memory of specrs, empty.
    pub fn own(specs: &'static [Spec]) -> Self {
        let column = |spec: &'static Spec| {
            let store = match spec.dtype {
                DType::I32 => Store::I32(Vec::new()),
                DType::I64 => Store::I64(Vec::new()),
                DType::Bool | DType::U8 => Store::U8(Vec::new()),
            };
            Column { spec, store: Some(store), used: None, width: 1, marks: Vec::new() }
        };
        Self { columns: specs.iter().map(column).collect(), generation: 0, poison: false }
    }

    /// Arrays in memory of fixed capacity, one for each of `specs` in their order; `None` for one that is left out.
    /// All of it is set to 0, the dead value.
    ///
    /// # Errors
    /// [`Error::Mismatch`] where memory is shorter than its extent says; [`Error::Invalid`] where there is no memory to
    /// remember the rows of a table.
    pub fn fixed(specs: &'static [Spec], given: Vec<Option<Given>>) -> Result<Self> {
        let mut columns = Vec::with_capacity(specs.len());
        for (spec, given) in specs.iter().zip(given.into_iter().chain(std::iter::repeat_with(|| None))) {
            let mut column = Column { spec, store: None, used: None, width: 1, marks: Vec::new() };
            if let Some(mut given) = given {
                let need = given.extent.elements().saturating_mul(spec.dtype.size() as u64);
                let have = given.memory.bytes().len();
                if (have as u64) < need {
                    let want = format!("{need} bytes: {:?} of {}", given.extent.shape(), spec.dtype.name());
                    return Err(Error::Mismatch { operand: spec.name, got: format!("{have} bytes"), want });
                }
                if !given.memory.is_zeroed() {
                    given.memory.bytes_mut().fill(0);
                }
                if let Extent::Table { rows, cols } = given.extent {
                    column.width = cols;
                    // Rows without columns hold nothing, however many a caller says that there are.
                    grow(spec.name, &mut column.marks, if cols == 0 { 0 } else { rows as usize })?;
                }
                column.store = Some(Store::Given(given));
            }
            columns.push(column);
        }
        Ok(Self { columns, generation: 0, poison: false })
    }

    /// The arrays that there are, whatever the phase.
    pub fn specs(&self) -> impl Iterator<Item = &'static Spec> {
        self.columns.iter().map(|column| column.spec)
    }

    /// True if there are no arrays at all.
    pub fn is_empty(&self) -> bool {
        self.columns.is_empty()
    }

    /// Times that the arrays were written, or begun to be.
    pub fn generation(&self) -> u64 {
        self.generation
    }

    /// Debug mode: fill opened arrays with poison before they are written.
    pub fn set_poison(&mut self, on: bool) {
        self.poison = on;
    }

    /// Open the arrays of a phase, at the sizes to be written; the others are absent afterwards. `None` for an array
    /// that the format does not write this time.
    ///
    /// `hint` says which configuration asks for the sizes.
    ///
    /// # Errors
    /// [`Error::Capacity`] for the first array that is too small, before anything is changed; [`Error::Mismatch`] for
    /// an array that is missing.
    pub fn open<const N: usize>(
        &mut self,
        needs: [Option<Need>; N],
        hint: impl Fn() -> String,
    ) -> Result<[View<'_>; N]> {
        for need in needs.iter().flatten() {
            self.check(need, &hint)?;
        }
        self.generation += 1;
        let poison = &self.poison;
        let mut views = std::array::from_fn(|_| View::absent());
        for (i, column) in self.columns.iter_mut().enumerate() {
            column.used = None;
            let wanted = |need: &Option<Need>| need.as_ref().is_some_and(|need| need.array == i);
            if let Some(n) = needs.iter().position(wanted)
                && let Some(need) = &needs[n]
            {
                views[n] = column.view(need, poison)?;
            }
        }
        Ok(views)
    }

    /// True if memory of fixed size takes the arrays.
    pub(crate) fn is_fixed(&self) -> bool {
        self.columns.iter().any(|c| matches!(c.store, Some(Store::Given(_))))
    }

    /// Say that fixed memory holds `needs`, whatever it really holds: an old engine did so with the padding of its
    /// static buffers ([`Fault::StalePadding`](crate::revert::Fault)).
    ///
    /// # Errors
    /// Those of [`Arrays::open`].
    pub(crate) fn claim(&mut self, needs: &[Need], hint: impl Fn() -> String) -> Result<()> {
        needs.iter().try_for_each(|need| self.check(need, &hint))?;
        for need in needs {
            if let Some(column) = self.columns.get_mut(need.array).filter(|c| c.store.is_some()) {
                column.used = Some(need.used);
            }
        }
        Ok(())
    }

    fn check(&self, need: &Need, hint: &impl Fn() -> String) -> Result<()> {
        let Some(column) = self.columns.get(need.array) else {
            let (got, want) = (format!("{} arrays", self.columns.len()), format!("array {}", need.array));
            return Err(Error::Mismatch { operand: "arrays", got, want });
        };
        let have = match &column.store {
            Some(Store::Given(given)) => given.extent,
            Some(_) => need.limit,
            None if column.spec.optional => return Ok(()),
            None => {
                let want = format!("an array of {} elements; {}", need.used.elements(), hint());
                return Err(Error::Mismatch { operand: column.spec.name, got: "none".into(), want });
            }
        };
        let what = column.spec.name;
        let over =
            |need: u64, have: u64, of: &str| Err(Error::Capacity { what, need, have, hint: of.to_string() + &hint() });
        match (need.used, have) {
            (Extent::Line(n), have) if n > have.elements() => over(n, have.elements(), ""),
            (Extent::Table { rows, .. }, Extent::Table { rows: have, .. }) if rows > have => {
                over(rows, have, "rows of ")
            }
            (Extent::Table { cols, .. }, Extent::Table { cols: have, .. }) if cols > have => {
                over(cols, have, "columns of ")
            }
            (Extent::Table { rows, cols }, Extent::Line(have)) if rows * cols > have => over(rows * cols, have, ""),
            _ => Ok(()),
        }
    }

    /// The array `name` as it was last written; `None` if the last phase had none.
    pub fn get(&self, name: &str) -> Option<ArrayRef<'_>> {
        self.iter().find(|a| a.spec.name == name)
    }

    /// The elements of a line; empty where the last phase had no such array.
    pub fn line<T: Element>(&self, name: &str) -> &[T] {
        self.get(name).and_then(|a| bytemuck::try_cast_slice(a.bytes).ok()).unwrap_or(&[])
    }

    /// The columns in use of row `row` of a table; empty where there is none.
    pub fn row<T: Element>(&self, name: &str, row: usize) -> &[T] {
        let Some(a) = self.get(name) else { return &[] };
        let Extent::Table { cols, .. } = a.extent else { return &[] };
        let all: &[T] = bytemuck::try_cast_slice(a.bytes).unwrap_or(&[]);
        all.get(row * a.width as usize..).and_then(|r| r.get(..cols as usize)).unwrap_or(&[])
    }

    /// The arrays that the last phase wrote, in the format's order.
    pub fn iter(&self) -> impl Iterator<Item = ArrayRef<'_>> {
        self.columns.iter().filter_map(|column| {
            let extent = column.used?;
            let all: &[u8] = match column.store.as_ref()? {
                Store::I32(data) => bytemuck::cast_slice(data),
                Store::I64(data) => bytemuck::cast_slice(data),
                Store::U8(data) => data,
                Store::Given(given) => given.memory.bytes(),
            };
            let bytes = all.get(..span(extent, column.width) as usize * column.spec.dtype.size())?;
            Some(ArrayRef { spec: column.spec, bytes, extent, width: column.width })
        })
    }
}

/// Elements from the first to the last used one.
fn span(extent: Extent, width: u64) -> u64 {
    match extent {
        Extent::Line(n) => n,
        Extent::Table { rows: 0, .. } => 0,
        Extent::Table { rows, cols } => (rows - 1) * width + cols,
    }
}

impl Column {
    #[inline]
    fn view<'a>(&'a mut self, need: &Need, poison: &'a bool) -> Result<View<'a>> {
        if !matches!(self.store, Some(Store::Given(_))) {
            self.width = match need.used {
                Extent::Line(_) => 1,
                Extent::Table { cols, .. } => cols,
            };
        }
        let used = span(need.used, self.width) as usize;
        let elements = match &mut self.store {
            None => 0,
            Some(Store::Given(given)) => match need.used {
                Extent::Line(_) => used,
                Extent::Table { .. } => given.extent.elements() as usize,
            },
            Some(Store::I32(data)) => grow(self.spec.name, data, used).map(|()| used)?,
            Some(Store::I64(data)) => grow(self.spec.name, data, used).map(|()| used)?,
            Some(Store::U8(data)) => grow(self.spec.name, data, used).map(|()| used)?,
        };
        self.used = self.store.as_ref().map(|_| need.used);
        if *poison {
            self.marks.fill(self.width as u32); // no entry holds the dead value now
        }
        let Self { spec, store, marks, width, .. } = self;
        Ok(View { spec, store: store.as_mut(), elements, poison, width: *width as usize, marks })
    }
}

/// Fixed memory of specrs itself, for arrays that must not move.
#[derive(Debug)]
pub struct HostMemory {
    words: Vec<u64>,
    bytes: usize,
}

impl HostMemory {
    /// `bytes` zeroed bytes, aligned to 8.
    ///
    /// # Errors
    /// [`Error::Invalid`] where there is no memory.
    pub fn new(name: &'static str, bytes: u64) -> Result<Self> {
        let mut words = Vec::new();
        let len = usize::try_from(bytes.div_ceil(8)).unwrap_or(usize::MAX);
        grow(name, &mut words, len)?;
        Ok(Self { words, bytes: bytes as usize })
    }
}

impl Memory for HostMemory {
    fn bytes(&self) -> &[u8] {
        &bytemuck::cast_slice(&self.words)[..self.bytes]
    }

    fn bytes_mut(&mut self) -> &mut [u8] {
        &mut bytemuck::cast_slice_mut(&mut self.words)[..self.bytes]
    }
}
