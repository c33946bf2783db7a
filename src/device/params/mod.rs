//! Declarations on which kernels and their launches agree, made once for Rust and C++: parameters, constants, and the
//! ids of faults. A family of kernels has a file here.
//!
//! A declaration makes a `#[repr(C)]` struct of its module and the same struct in C++. `build.rs` includes this module and
//! writes [`header`] as `params.cuh` beside the PTX. A struct has no padding, which the Rust compiler asserts here; the
//! C++ compiler asserts in the header that each field lies where it lies in Rust. A struct may hold others that are
//! declared before it: what several kernels take is declared once.
//!
//! A new kernel declares its struct and its ids in the file of its family. A new file is named twice below.
//!
//! Device addresses are `u64`, which has one layout for every compiler. The launchers fill them from typed views, and
//! nothing else builds these structs.

use std::collections::{BTreeMap, BTreeSet};

/// The C++ name of a type that a field may have.
macro_rules! cpp {
    (u64) => {
        "uint64_t"
    };
    (i64) => {
        "int64_t"
    };
    (u32) => {
        "uint32_t"
    };
    (i32) => {
        "int32_t"
    };
    ($declared:ident) => {
        stringify!($declared)
    };
}

/// Rust items of constants, ids and structs, and `DECLARED`, from which the header is written.
macro_rules! declare {
    (
        $(constants {$(
            $(#[doc = $constant_doc:literal])+
            $constant:ident = $constant_value:literal,
        )+})?
        $(ids {$(
            $table:ident { $($id:ident = $id_value:literal: $id_text:literal,)+ }
        )+})?
        $(structs {$(
            $(#[doc = $doc:literal])+
            $name:ident { $($(#[doc = $field_doc:literal])+ $field:ident: $ty:ident,)+ }
        )+})?
    ) => {
        $($(
            $(#[doc = $constant_doc])+
            pub const $constant: i32 = $constant_value;
        )+)?
        $($($(
            #[doc = $id_text]
            pub const $id: i32 = $id_value;
        )+)+)?
        $($(
            $(#[doc = $doc])+
            #[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
            #[repr(C)]
            pub struct $name {
                $($(#[doc = $field_doc])+ pub $field: $ty,)+
            }

            const _: () = {
                let mut end = 0;
                $(
                    assert!(
                        std::mem::offset_of!($name, $field) == end,
                        concat!(
                            file!(), ": ", stringify!($name), ".", stringify!($field),
                            ": padding before this field: declare a reserved one there"
                        )
                    );
                    end += size_of::<$ty>();
                )+
                assert!(
                    size_of::<$name>() == end,
                    concat!(file!(), ": ", stringify!($name), ": padding at its end: declare a reserved field there")
                );
            };
        )+)?

        /// Declarations of this file.
        pub(super) const DECLARED: super::Declared = super::Declared {
            file: file!(),
            constants: &[$($((stringify!($constant), $constant_value, &[$($constant_doc),+])),+)?],
            ids: &[$($($((super::Table::$table, stringify!($id), $id_value, $id_text)),+),+)?],
            structs: &[$($(super::Struct {
                name: stringify!($name),
                docs: &[$($doc),+],
                fields: &[$(super::Field {
                    name: stringify!($field),
                    docs: &[$($field_doc),+],
                    cpp: cpp!($ty),
                    offset: std::mem::offset_of!($name, $field),
                }),+],
                size: size_of::<$name>(),
            }),+)?],
        };
    };
}

pub mod attention;
pub mod draft;
pub mod faults;
pub mod fingerprint;
pub mod kv;
pub mod linear;
pub mod loop_count;
pub mod plan;
pub mod rope_kv;
pub mod round_end;
pub mod rows;
pub mod table;
pub mod verify;

/// All files, each after those whose structs it holds.
const FILES: &[Declared] = &[
    faults::DECLARED,
    table::DECLARED,
    attention::DECLARED,
    draft::DECLARED,
    fingerprint::DECLARED,
    kv::DECLARED,
    linear::DECLARED,
    loop_count::DECLARED,
    plan::DECLARED,
    rope_kv::DECLARED,
    round_end::DECLARED,
    rows::DECLARED,
    verify::DECLARED,
];

/// A table of ids: an enumeration in C++.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Table {
    /// Values of [`FaultRecord::kernel`](faults::FaultRecord::kernel); the names that errors carry.
    Kernel,
    /// Values of [`FaultRecord::buffer`](faults::FaultRecord::buffer); the names that errors carry.
    Buffer,
    /// Values of [`FaultRecord::probe`](faults::FaultRecord::probe); the values that errors name.
    Probe,
    /// Values of [`FillParams::mirror`](fingerprint::FillParams::mirror).
    Mirror,
}

/// Declarations of one file.
#[derive(Debug, Clone, Copy)]
struct Declared {
    file: &'static str,
    /// Name, value, documentation.
    constants: &'static [(&'static str, i32, &'static [&'static str])],
    /// Table, name, value, text.
    ids: &'static [(Table, &'static str, i32, &'static str)],
    structs: &'static [Struct],
}

#[derive(Debug, Clone, Copy)]
struct Struct {
    name: &'static str,
    docs: &'static [&'static str],
    fields: &'static [Field],
    size: usize,
}

#[derive(Debug, Clone, Copy)]
struct Field {
    name: &'static str,
    docs: &'static [&'static str],
    cpp: &'static str,
    offset: usize,
}

/// The text of an id; `unknown` for one that no file declares.
pub fn text_of(table: Table, id: i32) -> &'static str {
    let mut ids = FILES.iter().flat_map(|file| file.ids);
    ids.find(|(of, _, value, _)| (*of, *value) == (table, id)).map_or("unknown", |(.., text)| text)
}

/// The declarations in C++: `params.cuh`.
///
/// # Errors
/// Where two ids of a table are equal, and where a field has a type that C++ does not know there.
pub fn header() -> Result<String, String> {
    header_of(FILES)
}

fn header_of(files: &[Declared]) -> Result<String, String> {
    let mut text =
        "// Written by build.rs from src/device/params.\n#pragma once\n\n#include <cstddef>\n#include <cstdint>\n\n\
                    namespace specrs {\n"
            .to_owned();
    let comment = |indent: &str, docs: &[&str]| docs.iter().map(|doc| format!("{indent}//{doc}\n")).collect::<String>();
    for (name, value, docs) in files.iter().flat_map(|file| file.constants) {
        text += &format!("\n{}constexpr int32_t {name} = {value};\n", comment("", docs));
    }
    let mut tables = BTreeMap::<Table, BTreeMap<i32, (&str, &str, &str)>>::new();
    for file in files {
        for (table, name, value, what) in file.ids {
            if let Some((other, _, place)) = tables.entry(*table).or_default().insert(*value, (name, what, file.file)) {
                return Err(format!("{}: {name} = {value}: {other} of {place} has that id: choose another", file.file));
            }
        }
    }
    for (table, ids) in tables {
        text += &format!("\nenum {table:?} : int32_t {{\n");
        for (value, (name, what, _)) in ids {
            text += &format!("    {name} = {value},  // {what}\n");
        }
        text += "};\n";
    }
    let mut known = BTreeSet::from(["uint64_t", "int64_t", "uint32_t", "int32_t"]);
    for (file, Struct { name, docs, fields, size }) in files.iter().flat_map(|f| f.structs.iter().map(|s| (f.file, s)))
    {
        text += &format!("\n{}struct {name} {{\n", comment("", docs));
        for field in *fields {
            if !known.contains(field.cpp) {
                return Err(format!(
                    "{file}: {name}.{}: type {}: neither u64, i64, u32 or i32 nor a struct that is declared before",
                    field.name, field.cpp
                ));
            }
            text += &format!("{}    {} {};\n", comment("    ", field.docs), field.cpp, field.name);
        }
        text += "};\n";
        for Field { name: field, offset, .. } in *fields {
            text += &format!(
                "static_assert(offsetof({name}, {field}) == {offset}, \"{file}: {name}.{field}: at byte {offset} in Rust\");\n"
            );
        }
        text += &format!("static_assert(sizeof({name}) == {size}, \"{file}: {name}: {size} bytes in Rust\");\n");
        known.insert(name);
    }
    Ok(text + "\n}  // namespace specrs\n")
}

#[cfg(test)]
mod tests {
    use super::*;

    /// `(name, offset)` of the fields of every struct of a header, and its size, by the rules of C.
    fn layouts(header: &str) -> BTreeMap<String, (Vec<(String, usize)>, usize)> {
        let mut types = BTreeMap::from(["uint64_t", "int64_t"].map(|name| (name.to_owned(), (8, 8))));
        types.extend(["uint32_t", "int32_t"].map(|name| (name.to_owned(), (4, 4))));
        let mut found = BTreeMap::new();
        for part in header.split("\nstruct ").skip(1) {
            let (name, body) = part.split("};").next().unwrap().split_once(" {\n").unwrap();
            let (mut fields, mut end, mut widest) = (vec![], 0usize, 1);
            for line in body.lines().map(str::trim).filter(|line| !line.starts_with("//")) {
                let (ty, field) = line.strip_suffix(';').unwrap().split_once(' ').unwrap();
                let (size, align) = types[ty];
                end = end.next_multiple_of(align);
                fields.push((field.to_owned(), end));
                (end, widest) = (end + size, widest.max(align));
            }
            types.insert(name.to_owned(), (end.next_multiple_of(widest), widest));
            found.insert(name.to_owned(), (fields, end.next_multiple_of(widest)));
        }
        found
    }

    #[test]
    fn header_and_structs_have_one_layout() {
        let structs = FILES.iter().flat_map(|file| file.structs);
        let want = structs.map(|Struct { name, fields, size, .. }| {
            let fields = fields.iter().map(|field| (field.name.to_owned(), field.offset)).collect();
            (name.to_string(), (fields, *size))
        });
        let want: BTreeMap<String, (Vec<(String, usize)>, usize)> = want.collect();
        assert_eq!(layouts(&header().unwrap()), want);
        assert_eq!(want["KvMoveParams"].0[4..6], [("report".to_owned(), 32), ("plane_bytes".to_owned(), 48)]);
        assert_eq!((want["FaultRecord"].1, want["KvMoveParams"].1), (48, 80));
    }

    #[test]
    fn every_field_and_every_size_is_asserted_in_cpp() {
        let header = header().unwrap();
        for (file, Struct { name, fields, size, .. }) in
            FILES.iter().flat_map(|f| f.structs.iter().map(|s| (f.file, s)))
        {
            for Field { name: field, offset, .. } in *fields {
                let want = format!("static_assert(offsetof({name}, {field}) == {offset}, \"{file}: {name}.{field}: ");
                assert!(header.contains(&want), "{want}");
            }
            assert!(header.contains(&format!("static_assert(sizeof({name}) == {size}, \"{file}: {name}: ")), "{name}");
        }
    }

    #[test]
    fn ids_are_those_of_the_header() {
        let header = header().unwrap();
        for table in [Table::Kernel, Table::Buffer, Table::Probe, Table::Mirror] {
            let body =
                header.split(&format!("enum {table:?} : int32_t {{\n")).nth(1).unwrap().split("};").next().unwrap();
            let values = body.lines().map(|l| l.split_once(" = ").unwrap().1.split_once(",  // ").unwrap());
            let mut count = 0;
            for (value, text) in values {
                assert_eq!(text_of(table, value.parse().unwrap()), text, "{table:?} {value}");
                count += 1;
            }
            assert_eq!(count, FILES.iter().flat_map(|f| f.ids).filter(|(of, ..)| *of == table).count(), "{table:?}");
        }
        assert_eq!(text_of(Table::Buffer, 99), "unknown");
    }

    #[test]
    fn a_wrong_declaration_is_refused_by_file_and_field() {
        const NONE: Declared = Declared { file: "a.rs", constants: &[], ids: &[], structs: &[] };
        let field = Field { name: "b", docs: &[], cpp: "f32", offset: 0 };
        let fields: &'static [Field] = Box::leak(Box::new([field]));
        let structs: &'static [Struct] = Box::leak(Box::new([Struct { name: "A", docs: &[], fields, size: 4 }]));
        let error = header_of(&[Declared { structs, ..NONE }]).unwrap_err();
        assert!(error.starts_with("a.rs: A.b: type f32: neither u64"), "{error}");

        let one = Declared { ids: &[(Table::Kernel, "KERNEL_A", 7, "a")], ..NONE };
        let other = Declared { file: "b.rs", ids: &[(Table::Kernel, "KERNEL_B", 7, "b")], ..NONE };
        let apart = Declared { file: "b.rs", ids: &[(Table::Buffer, "BUFFER_B", 7, "b")], ..NONE };
        let error = header_of(&[one, other]).unwrap_err();
        assert_eq!(error, "b.rs: KERNEL_B = 7: KERNEL_A of a.rs has that id: choose another");
        assert!(header_of(&[one, apart]).is_ok());
    }
}
