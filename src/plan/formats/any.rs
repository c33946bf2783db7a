//! [`AnyFormat`]: a format chosen at run time.

use crate::error::{Error, Result};
use crate::geometry::Geometry;
use crate::plan::{
    Arrays, DraftMask, FlashAttention, FlashInfer, Format, MaskForm, Native, Phase, Plan, Size, Spec, Triton,
};

/// A format chosen at run time.
#[derive(Debug, Clone, Copy)]
pub enum AnyFormat {
    /// specrs's own kernels.
    Native(Native),
    /// FlashInfer's wrappers.
    FlashInfer(FlashInfer),
    /// FlashAttention 3 and 4 over pages.
    FlashAttention(FlashAttention),
    /// sglang's Triton backend.
    Triton(Triton),
}

impl AnyFormat {
    /// Every format that [`AnyFormat::named`] knows, with the masks of both forms.
    pub const ALL: [AnyFormat; 4] = [
        AnyFormat::Native(Native),
        AnyFormat::FlashInfer(FlashInfer { mask: MaskForm::Both }),
        AnyFormat::FlashAttention(FlashAttention),
        AnyFormat::Triton(Triton),
    ];

    /// The format of a name that users give. `masks` chooses the forms of the masks of `flashinfer`: `"both"`, `"bool"`
    /// or `"packed"`.
    ///
    /// # Errors
    /// [`Error::Invalid`] that lists what there is.
    pub fn named(name: &str, masks: &str) -> Result<Self> {
        let mask = match masks {
            "both" => MaskForm::Both,
            "bool" => MaskForm::Bool,
            "packed" => MaskForm::Packed,
            _ => {
                let why = "want \"both\", \"bool\" or \"packed\"".into();
                return Err(Error::Invalid { what: "mask", got: format!("{masks:?}"), why });
            }
        };
        match Self::ALL.into_iter().find(|f| f.name() == name) {
            Some(AnyFormat::FlashInfer(_)) => Ok(AnyFormat::FlashInfer(FlashInfer { mask })),
            Some(format) => Ok(format),
            None => {
                let names: Vec<&str> = Self::ALL.iter().map(Format::name).collect();
                let why = format!("want one of {}", names.join(", "));
                Err(Error::Invalid { what: "format", got: format!("{name:?}"), why })
            }
        }
    }

    fn inner(&self) -> &dyn Format {
        match self {
            AnyFormat::Native(f) => f,
            AnyFormat::FlashInfer(f) => f,
            AnyFormat::FlashAttention(f) => f,
            AnyFormat::Triton(f) => f,
        }
    }
}

impl Format for AnyFormat {
    fn name(&self) -> &'static str {
        self.inner().name()
    }

    fn arrays(&self) -> &'static [Spec] {
        self.inner().arrays()
    }

    fn supports(&self, geometry: &Geometry) -> Result<()> {
        self.inner().supports(geometry)
    }

    fn supports_mask(&self, geometry: &Geometry, mask: DraftMask<'_>) -> Result<()> {
        self.inner().supports_mask(geometry, mask)
    }

    fn sizes(&self, geometry: &Geometry, phase: Phase) -> Vec<(usize, Size)> {
        self.inner().sizes(geometry, phase)
    }

    fn reads(
        &self,
        plan: &Plan,
        geometry: &Geometry,
        arrays: &Arrays,
        q: usize,
        out: &mut Vec<i32>,
    ) -> Result<Option<()>> {
        self.inner().reads(plan, geometry, arrays, q, out)
    }

    fn reads_holes(&self, geometry: &Geometry) -> bool {
        self.inner().reads_holes(geometry)
    }
}
