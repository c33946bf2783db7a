//! Rows of floats in device memory: activations, weights of a norm, logits.

use crate::error::{Error, Result, in_range};
use crate::overlap::{Operand, Span};

/// Element type of rows.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FloatType {
    /// `float32`.
    F32,
    /// `bfloat16`.
    Bf16,
    /// `float16`.
    F16,
}

impl FloatType {
    /// Bytes of an element.
    pub fn bytes(self) -> u64 {
        match self {
            FloatType::F32 => 4,
            FloatType::Bf16 | FloatType::F16 => 2,
        }
    }

    /// The type's name.
    pub fn name(self) -> &'static str {
        match self {
            FloatType::F32 => "float32",
            FloatType::Bf16 => "bfloat16",
            FloatType::F16 => "float16",
        }
    }
}

/// `[rows, columns]` of floats on a CUDA device, elements of a row behind one another, `stride` elements from row to row.
/// A vector is one row.
#[derive(Debug, Clone, Copy)]
pub struct Rows {
    /// The operand in errors.
    what: &'static str,
    /// Aligned to the element; not null unless there are no rows.
    address: u64,
    /// Fits `i32`.
    rows: usize,
    /// At least 1; fits `i32`.
    columns: usize,
    /// At least `columns`; all bytes fit `i64`.
    stride: usize,
    float: FloatType,
    device: i32,
}

impl Rows {
    /// View `rows` x `columns` elements at `address`. `what` names the operand in errors.
    ///
    /// # Errors
    /// [`Error::OutOfRange`] for sizes that int32 does not index; [`Error::Mismatch`] for an address that is not aligned
    /// to the element, or rows that overlap; [`Error::Overflow`] for more bytes than int64 counts.
    ///
    /// # Safety
    /// All rows are allocated on `device`, and stay so until all work launched with the view has finished. Where a launch
    /// writes them, nothing else reads or writes them meanwhile; where it reads them, nothing writes them.
    pub unsafe fn from_raw(
        what: &'static str,
        address: u64,
        [rows, columns]: [usize; 2],
        stride: usize,
        float: FloatType,
        device: i32,
    ) -> Result<Self> {
        in_range(what, rows as u64, 0, i128::from(i32::MAX))?;
        in_range(what, columns as u64, 1, i128::from(i32::MAX))?;
        if stride < columns {
            return Err(Error::Mismatch {
                operand: what,
                got: format!("{stride} elements from row to row"),
                want: format!("at least {columns}, the elements of a row"),
            });
        }
        let bytes = (rows as u64).checked_mul(stride as u64).and_then(|n| n.checked_mul(float.bytes()));
        if bytes.is_none_or(|b| b > i64::MAX as u64) {
            return Err(Error::Overflow {
                what,
                expr: format!("{rows} * {stride} * {}", float.bytes()),
                ty: "int64",
                limit: i64::MAX as u64,
            });
        }
        if rows != 0 && (address == 0 || !address.is_multiple_of(float.bytes())) {
            return Err(Error::Mismatch {
                operand: what,
                got: format!("device address {address:#x}"),
                want: format!("an address aligned to {} bytes", float.bytes()),
            });
        }
        Ok(Self { what, address, rows, columns, stride, float, device })
    }

    /// Columns `first..first + columns` of every row.
    ///
    /// # Errors
    /// [`Error::OutOfRange`] for columns that are not there.
    pub fn part(&self, first: usize, columns: usize) -> Result<Self> {
        in_range("first column", first as u64, 0, self.columns as i128 - 1)?;
        in_range("columns", columns as u64, 1, (self.columns - first) as i128)?;
        Ok(Self { address: self.address + first as u64 * self.float.bytes(), columns, ..*self })
    }

    /// The operand in errors.
    pub fn what(&self) -> &'static str {
        self.what
    }

    /// Device address.
    pub fn address(&self) -> u64 {
        self.address
    }

    /// Rows.
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// Elements of a row.
    pub fn columns(&self) -> usize {
        self.columns
    }

    /// Elements from row to row.
    pub fn stride(&self) -> usize {
        self.stride
    }

    /// Bytes from row to row.
    pub fn stride_bytes(&self) -> u64 {
        self.stride as u64 * self.float.bytes()
    }

    /// Element type.
    pub fn float(&self) -> FloatType {
        self.float
    }

    /// CUDA device ordinal.
    pub fn device(&self) -> i32 {
        self.device
    }

    /// True if every row starts at a multiple of 16 bytes and is a multiple of 16 bytes long.
    pub fn in_vectors(&self) -> bool {
        let row = self.columns as u64 * self.float.bytes();
        (self.address | self.stride_bytes() | row).is_multiple_of(16)
    }

    /// Check the sizes and the element type.
    ///
    /// # Errors
    /// [`Error::Mismatch`] with both.
    pub fn expect(&self, rows: usize, columns: usize, float: FloatType) -> Result<()> {
        if (self.rows, self.columns, self.float) == (rows, columns, float) {
            return Ok(());
        }
        Err(Error::Mismatch {
            operand: self.what,
            got: format!("{} [{}, {}]", self.float.name(), self.rows, self.columns),
            want: format!("{} [{rows}, {columns}]", float.name()),
        })
    }
}

impl Operand for Rows {
    fn span(&self) -> Span {
        // `from_raw` saw that all bytes fit.
        let rows = self.rows as u64;
        let bytes =
            rows.saturating_sub(1) * self.stride_bytes() + rows.min(1) * self.columns as u64 * self.float.bytes();
        Span::new(self.what, self.address, bytes)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rows(address: u64, shape: [usize; 2], stride: usize, float: FloatType) -> Result<Rows> {
        // SAFETY: nothing is launched with it.
        unsafe { Rows::from_raw("x", address, shape, stride, float, 0) }
    }

    #[test]
    fn rows_that_no_kernel_can_index_are_refused() {
        let text = |r: Result<Rows>| r.unwrap_err().to_string();
        assert!(text(rows(16, [1 << 31, 4], 4, FloatType::Bf16)).contains("x = 2147483648 is outside 0..="));
        assert!(text(rows(16, [4, 0], 4, FloatType::Bf16)).contains("x = 0 is outside 1..="));
        assert!(text(rows(16, [4, 4], 3, FloatType::Bf16)).contains("3 elements from row to row"));
        assert!(text(rows(17, [4, 4], 4, FloatType::F16)).contains("0x11"));
        assert!(text(rows(18, [4, 4], 4, FloatType::F32)).contains("aligned to 4 bytes"));
        assert!(text(rows(16, [1 << 30, 4], 1 << 40, FloatType::F32)).contains("does not fit int64"));
        assert!(rows(0, [0, 4], 4, FloatType::F32).is_ok());
    }

    #[test]
    fn a_part_has_the_address_and_the_stride_of_its_columns() {
        let whole = rows(4096, [3, 24], 32, FloatType::Bf16).unwrap();
        assert!(whole.in_vectors());
        let part = whole.part(8, 16).unwrap();
        assert_eq!((part.address(), part.columns(), part.stride_bytes()), (4096 + 16, 16, 64));
        assert!(part.in_vectors() && !whole.part(4, 8).unwrap().in_vectors());
        assert!(whole.part(24, 1).is_err() && whole.part(16, 9).is_err() && whole.part(0, 0).is_err());
        assert!(whole.expect(3, 24, FloatType::Bf16).is_ok());
        let error = whole.expect(3, 24, FloatType::F16).unwrap_err().to_string();
        assert!(error.contains("got bfloat16 [3, 24], want float16 [3, 24]"), "{error}");
    }
}
