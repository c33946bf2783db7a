//! Parts that tests of the `flash_attention` format share: its arrays as plain vectors, and memory of fixed size for
//! them.

use specrs::geometry::Geometry;
use specrs::plan::{Arrays, AuditedPlan, Extent, FlashAttention, Format, Given, HostMemory, Load, Phase, Planner};

use super::Batch as Case;

pub type Planned = AuditedPlan<FlashAttention>;

pub fn planner(g: Geometry) -> Planner<FlashAttention> {
    Planner::new(g, FlashAttention).unwrap()
}

/// All arrays, tables as rows.
#[derive(Debug, PartialEq)]
pub struct Got {
    pub cache_seqlens: Vec<i32>,
    pub page_table: Vec<Vec<i32>>,
    pub cu_seqlens_q: Vec<i32>,
    pub expand_cache_seqlens: Vec<i32>,
    pub expand_page_table: Vec<Vec<i32>>,
    pub expand_cu_seqlens_q: Vec<i32>,
}

pub fn got(arrays: &Arrays) -> Got {
    let line = |name| arrays.line::<i32>(name).to_vec();
    let table = |name| match arrays.get(name).map(|a| a.extent) {
        Some(Extent::Table { rows, .. }) => (0..rows as usize).map(|r| arrays.row::<i32>(name, r).to_vec()).collect(),
        _ => vec![],
    };
    Got {
        cache_seqlens: line("cache_seqlens"),
        page_table: table("page_table"),
        cu_seqlens_q: line("cu_seqlens_q"),
        expand_cache_seqlens: line("expand_cache_seqlens"),
        expand_page_table: table("expand_page_table"),
        expand_cu_seqlens_q: line("expand_cu_seqlens_q"),
    }
}

/// Page of each column of a request's row.
pub fn pages(case: &Case, i: usize) -> Vec<i32> {
    case.pool.pages(case.seqs[i]).unwrap().iter().map(|p| p.as_i32()).collect()
}

/// Arrays of fixed capacity for `requests` of the geometry, whose tables are `wider` columns wider than needed.
pub fn fixed(g: &Geometry, phase: Phase, requests: u32, wider: u64) -> Arrays {
    let load = Load::limit(g, phase, requests).unwrap();
    let mut given: Vec<Option<Given>> = FlashAttention.arrays().iter().map(|_| None).collect();
    for (array, extent) in FlashAttention.extents(g, &load).unwrap() {
        let extent = match extent {
            Extent::Table { rows, cols } => Extent::Table { rows, cols: cols + wider },
            line => line,
        };
        let memory = Box::new(HostMemory::new("test", extent.elements() * 4).unwrap());
        given[array] = Some(Given { memory, extent });
    }
    Arrays::fixed(FlashAttention.arrays(), given).unwrap()
}
