//! Parameter structs of the kernels, mirrored by `cuda/params.cuh`; both sides assert the same sizes and offsets.
//!
//! Device addresses are `u64`: the launcher fills them from typed views, and nothing else builds these structs.

use std::mem::{offset_of, size_of};

/// What a kernel did not do, and why. Lies in pinned host memory mapped into the device's address space.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[repr(C)]
pub struct FaultRecord {
    /// Written by the host: number of the fault that may be recorded next, counted from 1.
    pub epoch: u32,
    /// Written last by the device: the fields below are complete when it equals `epoch`.
    pub ready: u32,
    /// Kernel id ([`KERNELS`]).
    pub kernel: i32,
    /// Buffer id ([`BUFFERS`]).
    pub buffer: i32,
    /// Row of the batch.
    pub request: i32,
    /// Move, branch, step or node within the request; -1 where none applies.
    pub step: i32,
    /// The index that was computed.
    pub index: i64,
    /// One past the largest allowed index.
    pub bound: i64,
}

const _: () = {
    assert!(size_of::<FaultRecord>() == 40);
    assert!(offset_of!(FaultRecord, ready) == 4);
    assert!(offset_of!(FaultRecord, kernel) == 8);
    assert!(offset_of!(FaultRecord, buffer) == 12);
    assert!(offset_of!(FaultRecord, request) == 16);
    assert!(offset_of!(FaultRecord, step) == 20);
    assert!(offset_of!(FaultRecord, index) == 24);
    assert!(offset_of!(FaultRecord, bound) == 32);
};

/// Kernel ids of [`FaultRecord::kernel`]: name in `cuda/params.cuh`, value, name that errors carry.
pub const KERNELS: &[(&str, i32, &str)] = &[("KERNEL_KV_MOVE", 1, "kv_move")];

/// Buffer ids of [`FaultRecord::buffer`]: name in `cuda/params.cuh`, value, name that errors carry.
pub const BUFFERS: &[(&str, i32, &str)] = &[
    ("BUFFER_CACHE_SRC", 1, "cache (source slot)"),
    ("BUFFER_CACHE_DST", 2, "cache (destination slot)"),
    ("BUFFER_MOVES", 3, "src and dst"),
    ("BUFFER_OFFSETS_ORDER", 4, "src and dst (offsets decrease)"),
];

/// Parameters of `cuda/kv_move.cu`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(C)]
pub struct KvMoveParams {
    /// Bytes of `[planes][num_slots][row]`; a plane is K or V of one layer.
    pub cache: u64,
    /// `int32[moves]`.
    pub src: u64,
    /// `int32[moves]`.
    pub dst: u64,
    /// `int32[requests + 1]`.
    pub offsets: u64,
    /// [`FaultRecord`] in mapped host memory.
    pub record: u64,
    /// `uint32` in device memory: the last epoch whose record was claimed.
    pub claim: u64,
    /// Bytes of a plane.
    pub plane_bytes: u64,
    /// Slots of a plane; slot 0 is the sink.
    pub num_slots: i32,
    /// Capacity of `src` and of `dst`.
    pub moves: i32,
    /// Rows of the batch; `offsets` holds one more.
    pub requests: i32,
    /// 2 * layers.
    pub planes: u32,
    /// Vectors of the kernel's width in a row; `planes * columns` always fits `i32`.
    pub columns: u32,
    /// Zero.
    pub reserved: u32,
}

const _: () = {
    assert!(size_of::<KvMoveParams>() == 80);
    assert!(offset_of!(KvMoveParams, src) == 8);
    assert!(offset_of!(KvMoveParams, dst) == 16);
    assert!(offset_of!(KvMoveParams, offsets) == 24);
    assert!(offset_of!(KvMoveParams, record) == 32);
    assert!(offset_of!(KvMoveParams, claim) == 40);
    assert!(offset_of!(KvMoveParams, plane_bytes) == 48);
    assert!(offset_of!(KvMoveParams, num_slots) == 56);
    assert!(offset_of!(KvMoveParams, moves) == 60);
    assert!(offset_of!(KvMoveParams, requests) == 64);
    assert!(offset_of!(KvMoveParams, planes) == 68);
    assert!(offset_of!(KvMoveParams, columns) == 72);
    assert!(offset_of!(KvMoveParams, reserved) == 76);
};

#[cfg(test)]
mod tests {
    use super::*;

    const HEADER: &str = include_str!("../../cuda/params.cuh");

    /// `NAME = value,` lines of the enum called `name`.
    fn enum_of_header(name: &str) -> Vec<(String, i32)> {
        let body = HEADER.split(&format!("enum {name} : int32_t {{")).nth(1).unwrap().split("};").next().unwrap();
        let lines = body.lines().filter_map(|l| l.split("//").next().unwrap().trim().strip_suffix(','));
        lines.map(|l| l.split_once(" = ").unwrap()).map(|(n, v)| (n.to_owned(), v.parse().unwrap())).collect()
    }

    #[test]
    fn ids_are_those_of_the_header() {
        for (name, table) in [("Kernel", KERNELS), ("Buffer", BUFFERS)] {
            let ours: Vec<_> = table.iter().map(|(n, v, _)| ((*n).to_owned(), *v)).collect();
            assert_eq!(ours, enum_of_header(name), "{name}");
        }
    }

    #[test]
    fn every_assert_of_the_header_is_made_here_too() {
        let own = include_str!("params.rs");
        let mut asserts = 0;
        for line in HEADER.lines().filter_map(|l| l.strip_prefix("static_assert(")) {
            let what = line.split(", \"").next().unwrap();
            let text = what.replace("offsetof(", "offset_of!(");
            let text = match text.strip_prefix("sizeof(") {
                Some(rest) => format!("size_of::<{}", rest.replacen(')', ">()", 1)),
                None => text,
            };
            assert!(own.contains(&format!("assert!({});", text)), "{text}");
            asserts += 1;
        }
        assert!(asserts >= 21, "{asserts}");
    }
}
