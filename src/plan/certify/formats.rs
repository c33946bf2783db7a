//! The certificate of a format: the needs of each phase, and the failures.

use crate::error::Result;
use crate::geometry::{Buffer, Geometry, Layout};
use crate::plan::certify::proof::Proof;
use crate::plan::certify::{Failure, count, written};
use crate::plan::{AnyFormat, Extent, Format, Load, Phase, Spec, phases};

/// A format in every layout of a configuration.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FormatCertificate {
    /// Name of the format.
    pub format: &'static str,
    /// Dense, and holey where it differs.
    pub layouts: Vec<FormatLayout>,
}

impl FormatCertificate {
    /// True if nothing failed in any layout that the format can do. See [`Self::usable`].
    pub fn holds(&self) -> bool {
        self.layouts.iter().all(|l| l.failed == 0)
    }

    /// True if the format can do the configuration in some layout.
    pub fn usable(&self) -> bool {
        self.layouts.iter().any(|l| l.refused.is_none())
    }
}

/// A format in one layout.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FormatLayout {
    /// The layout.
    pub layout: Layout,
    /// Reason why the format cannot do it, and an alternative that works; nothing else was looked at then.
    pub refused: Option<String>,
    /// Capacity of every array of every phase for the largest batch, each draft step for itself.
    pub arrays: Vec<FormatArray>,
    /// Sizes compared with capacities.
    pub sizes: u64,
    /// Plans whose arrays were written.
    pub plans: u64,
    /// Slots that were read back from arrays and compared with the plan.
    pub reads: u64,
    /// Context of the rows whose arrays were written: the limit's, or what a proof has the memory for.
    pub written_context: u32,
    /// The first failures.
    pub failures: Vec<Failure>,
    /// Failures there were.
    pub failed: u64,
}

impl FormatLayout {
    /// Bytes of the arrays of `phase`: of `"draft"` those of all steps.
    pub fn bytes(&self, phase: &str) -> u64 {
        self.arrays.iter().filter(|a| a.phase == phase).map(|a| a.bytes).sum()
    }

    /// Bytes of all arrays of rounds, with a place of its own for each draft step, as captured graphs need them; without
    /// those of a prefill (`"extend"`), which are as long as its chunk.
    pub fn round_bytes(&self) -> u64 {
        self.arrays.iter().filter(|a| a.phase != "extend").map(|a| a.bytes).sum()
    }
}

/// Capacity of one array in one phase.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FormatArray {
    /// Phase; `"extend"` is a prefill up to the end of the context, `"draft_extend"` the pass over accepted tokens.
    pub phase: &'static str,
    /// Step of a draft.
    pub step: Option<u32>,
    /// Name.
    pub name: &'static str,
    /// Element type.
    pub dtype: &'static str,
    /// Sizes of the dimensions.
    pub shape: Vec<u64>,
    /// Bytes.
    pub bytes: u64,
    /// Derivation of the size, with the numbers.
    pub formula: String,
}

/// Prove `format` for `geometries`, which differ in layout.
pub(super) fn certify(format: AnyFormat, geometries: &[Geometry]) -> Result<FormatCertificate> {
    let layouts = geometries.iter().map(|g| layout(format, g)).collect::<Result<_>>()?;
    Ok(FormatCertificate { format: format.name(), layouts })
}

fn layout(format: AnyFormat, g: &Geometry) -> Result<FormatLayout> {
    let mut proof = Proof { layout: g.layout(), ..Proof::default() };
    let refused = format.supports(g).err().map(|error| error.to_string());
    let (mut arrays, mut written) = (Vec::new(), written::Written::default());
    if refused.is_none() {
        count::full_batches(&mut proof, &format, g);
        arrays = capacities(&format, g)?;
        written = written::rows(&mut proof, format, g)?;
    }
    Ok(FormatLayout {
        layout: g.layout(),
        refused,
        arrays,
        sizes: proof.placed,
        plans: proof.plans,
        reads: written.reads,
        written_context: written.context,
        failures: proof.failures,
        failed: proof.failed,
    })
}

/// Every array of every phase at its largest; for the native format, those that the geometry lists.
fn capacities(format: &AnyFormat, g: &Geometry) -> Result<Vec<FormatArray>> {
    if let AnyFormat::Native(_) = format {
        return Ok(g.buffers().iter().flat_map(|b| native(b, g.shape().steps())).collect());
    }
    let b = g.limits().max_batch;
    let mut all = Vec::new();
    for phase in phases(g) {
        let step = match phase {
            Phase::Draft { step } => Some(step),
            _ => None,
        };
        for c in format.capacities(g, phase, b)? {
            all.push(array_of(phase.name(), step, &format.arrays()[c.array], c.extent, c.formula.to_string()));
        }
        if phase == Phase::Extend {
            let n = g.max_accepted();
            for (array, extent) in format.extents(g, &accepted(g, b)?)? {
                let formula = format!("max_batch {b}, at most min(steps + 1, draft_tokens) {n} tokens each");
                all.push(array_of("draft_extend", None, &format.arrays()[array], extent, formula));
            }
        }
    }
    Ok(all)
}

/// The draft model's pass over the accepted tokens: an extend of a few tokens, behind any prefix.
fn accepted(g: &Geometry, requests: u32) -> Result<Load> {
    let n = g.max_accepted().min(g.limits().max_context_len);
    Ok(Load { queries: requests as u64 * n as u64, ..Load::limit(g, Phase::Extend, requests)? })
}

fn array_of(phase: &'static str, step: Option<u32>, spec: &Spec, extent: Extent, formula: String) -> FormatArray {
    let (shape, bytes) = (extent.shape(), extent.elements() * spec.dtype.size() as u64);
    FormatArray { phase, step, name: spec.name, dtype: spec.dtype.name(), shape, bytes, formula }
}

/// An array that the geometry lists; a draft's once a step.
fn native(b: &Buffer, steps: u32) -> Vec<FormatArray> {
    let one = |step| FormatArray {
        phase: b.phase,
        step,
        name: b.name,
        dtype: b.dtype,
        shape: vec![b.elements],
        bytes: b.bytes,
        formula: b.formula.clone(),
    };
    if b.phase == "draft" { (0..steps).map(|t| one(Some(t))).collect() } else { vec![one(None)] }
}
