//! Where the Python module takes `Array` from.

pub(super) use super::dlpack::{Array, as_array};
