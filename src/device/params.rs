//! The parameter structs and the fault record of the kernels, each declared once, here.
//!
//! A declaration makes a `#[repr(C)]` struct of this module and its text in `HEADER`. `build.rs` includes this file and
//! writes that text as `params.cuh` beside the PTX. Both compilers assert that a struct has no padding: fields of the
//! same types in the same order then lie at the same offsets. A new kernel adds its struct and its ids below.
//!
//! Device addresses are `u64`, which has one layout for every compiler. The launchers fill them from typed views, and
//! nothing else builds these structs.

use std::mem::{offset_of, size_of};

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
}

/// Rust items and C++ text of tables of ids and of structs.
macro_rules! declare {
    (
        ids {$(
            $(#[doc = $table_doc:literal])+
            $table:ident as $enum:ident { $($id:ident = $value:literal: $text:literal,)+ }
        )+}
        structs {$(
            $(#[doc = $doc:literal])+
            $name:ident { $($(#[doc = $field_doc:literal])+ $field:ident: $ty:ident,)+ }
        )+}
    ) => {
        $(
            $(#[doc = $table_doc])+
            pub const $table: &[(i32, &str)] = &[$(($value, $text)),+];
        )+
        $(
            $(#[doc = $doc])+
            #[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
            #[repr(C)]
            pub struct $name {
                $($(#[doc = $field_doc])+ pub $field: $ty,)+
            }

            const _: () = {
                let mut end = 0;
                $(
                    assert!(offset_of!($name, $field) == end, "padding before a field: add a reserved one");
                    end += size_of::<$ty>();
                )+
                assert!(size_of::<$name>() == end, "padding at the end: add a reserved field");
            };
        )+

        /// The declarations in C++: `params.cuh`.
        #[doc(hidden)]
        pub const HEADER: &str = concat!(
            "// Written by build.rs from src/device/params.rs.\n#pragma once\n\n#include <cstdint>\n\n",
            "namespace specrs {\n",
            $(
                $("\n//", $table_doc,)+
                "\nenum ", stringify!($enum), " : int32_t {\n",
                $("    ", stringify!($id), " = ", $value, ",  // ", $text, "\n",)+
                "};\n",
            )+
            $(
                $("\n//", $doc,)+
                "\nstruct ", stringify!($name), " {\n",
                $($("    //", $field_doc, "\n",)+ "    ", cpp!($ty), " ", stringify!($field), ";\n",)+
                "};\nstatic_assert(sizeof(", stringify!($name), ") == 0", $(" + sizeof(", cpp!($ty), ")",)+
                ", \"padding: the mirror in src/device/params.rs has none\");\n",
            )+
            "\n}  // namespace specrs\n"
        );
    };
}

declare! {
    ids {
        /// Values of [`FaultRecord::kernel`], and the names that errors carry.
        KERNELS as Kernel {
            KERNEL_KV_MOVE = 1: "kv_move",
        }

        /// Values of [`FaultRecord::buffer`], and the names that errors carry.
        BUFFERS as Buffer {
            BUFFER_CACHE_SRC = 1: "cache (source slot)",
            BUFFER_CACHE_DST = 2: "cache (destination slot)",
            BUFFER_MOVES = 3: "src and dst",
            BUFFER_OFFSETS_ORDER = 4: "src and dst (offsets decrease)",
        }
    }
    structs {
        /// An access that a kernel skipped, and why. One per device, in pinned host memory mapped into the device's address
        /// space: the host reads it without a copy or a synchronisation. Protocol: `cuda/common.cuh`.
        FaultRecord {
            /// Written by the host: number of the fault that may be recorded next, counted from 1.
            epoch: u32,
            /// Written last by the device: the fields below are complete when it equals `epoch`.
            ready: u32,
            /// Kernel id ([`KERNELS`]).
            kernel: i32,
            /// Buffer id ([`BUFFERS`]).
            buffer: i32,
            /// Row of the batch.
            request: i32,
            /// Move, branch, step or node within the request; -1 where none applies.
            step: i32,
            /// The index that was computed.
            index: i64,
            /// One past the largest allowed index.
            bound: i64,
        }

        /// Parameters of `cuda/kv_move.cu`, passed by value.
        KvMoveParams {
            /// Bytes of `[planes][num_slots][row]`; a plane is K or V of one layer.
            cache: u64,
            /// `int32[moves]`.
            src: u64,
            /// `int32[moves]`.
            dst: u64,
            /// `int32[requests + 1]`.
            offsets: u64,
            /// [`FaultRecord`] in mapped host memory.
            record: u64,
            /// `uint32` in device memory: the last epoch whose record was claimed.
            claim: u64,
            /// Bytes of a plane: `num_slots` rows.
            plane_bytes: u64,
            /// Slots of a plane; slot 0 is the sink.
            num_slots: i32,
            /// Capacity of `src` and of `dst`.
            moves: i32,
            /// Rows of the batch; `offsets` holds one more.
            requests: i32,
            /// 2 * layers.
            planes: u32,
            /// Vectors of the kernel's width in a row; `planes * columns` always fits `i32`.
            columns: u32,
            /// Zero; keeps the size a multiple of 8.
            reserved: u32,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// `(name, offset)` of the fields that the header's struct `name` has, and its size, by the rules of C.
    fn layout_in_header(name: &str) -> (Vec<(String, usize)>, usize) {
        let body = HEADER.split(&format!("struct {name} {{\n")).nth(1).unwrap().split("};").next().unwrap();
        let (mut fields, mut end) = (vec![], 0usize);
        for line in body.lines().map(str::trim).filter(|l| !l.starts_with("//")) {
            let (ty, field) = line.strip_suffix(';').unwrap().split_once(' ').unwrap();
            let size = if ty.contains("64") { 8 } else { 4 };
            end = end.next_multiple_of(size);
            fields.push((field.to_owned(), end));
            end += size;
        }
        (fields, end.next_multiple_of(8))
    }

    macro_rules! assert_same_layout {
        ($name:ident { $($field:ident @ $offset:literal)+ } $size:literal) => {
            let want = [$((stringify!($field).to_owned(), $offset)),+];
            assert_eq!(layout_in_header(stringify!($name)), (want.to_vec(), $size));
            assert_eq!(([$(offset_of!($name, $field)),+], size_of::<$name>()), ([$($offset),+], $size));
        };
    }

    #[test]
    fn header_and_structs_have_one_layout() {
        assert_same_layout!(FaultRecord {
            epoch @ 0 ready @ 4 kernel @ 8 buffer @ 12 request @ 16 step @ 20 index @ 24 bound @ 32
        } 40);
        assert_same_layout!(KvMoveParams {
            cache @ 0 src @ 8 dst @ 16 offsets @ 24 record @ 32 claim @ 40 plane_bytes @ 48 num_slots @ 56 moves @ 60
            requests @ 64 planes @ 68 columns @ 72 reserved @ 76
        } 80);
    }

    #[test]
    fn ids_are_those_of_the_header() {
        for (name, table) in [("Kernel", KERNELS), ("Buffer", BUFFERS)] {
            let body = HEADER.split(&format!("enum {name} : int32_t {{\n")).nth(1).unwrap().split("};").next().unwrap();
            let values = body.lines().map(|l| l.split_once(" = ").unwrap().1.split_once(",  // ").unwrap());
            let values: Vec<(i32, &str)> = values.map(|(v, text)| (v.parse().unwrap(), text)).collect();
            assert_eq!(values, table, "{name}");
        }
    }
}
