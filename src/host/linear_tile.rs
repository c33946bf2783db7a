//! The register tiles of [`PackedLinear`](super::linear::PackedLinear): a panel of 32 weight rows against a few rows
//! of x.

use pulp::Simd;

use crate::simd;

/// Weight rows (output columns) of a panel.
pub(crate) const PANEL: usize = 32;

/// One k of a panel: 32 weights, where a vector load finds columns `v..` of both halves (0..16 and 16..32).
pub(crate) trait Line: bytemuck::Pod + Send + Sync {
    /// True if a panel is widened to [`F32Line`]s once, before the tiles of so many rows: where `load` costs too much,
    /// or keeps too many registers, to be done for each of them.
    #[inline(always)]
    fn widens<S: Simd>(_: S, _rows: usize) -> bool {
        false
    }

    /// Store the weight of column `c < 32`, 0 before.
    fn set(&mut self, c: usize, w: f32);
    /// The weight of column `c < 32`.
    fn get(&self, c: usize) -> f32;
    /// Vector `v < 16 / width` of the low and of the high half.
    fn load<S: Simd>(&self, simd: S, v: usize) -> [S::f32s; 2];
}

/// bf16 weights, those of columns `c` and `c + 16` in one word (`c` low), so that a shift and a mask widen them.
pub(crate) type Bf16Line = [u32; 16];

impl Line for Bf16Line {
    fn set(&mut self, c: usize, w: f32) {
        let bits = u32::from(half::bf16::from_f32(w).to_bits());
        self[c % 16] |= if c < 16 { bits } else { bits << 16 };
    }

    fn get(&self, c: usize) -> f32 {
        f32::from_bits(if c < 16 { self[c] << 16 } else { self[c - 16] & 0xffff_0000 })
    }

    #[inline(always)]
    fn load<S: Simd>(&self, simd: S, v: usize) -> [S::f32s; 2] {
        let both = S::as_simd_u32s(self).0[v];
        let low = simd.wrapping_dyn_shl_u32s(both, simd.splat_u32s(16));
        let high = simd.and_u32s(both, simd.splat_u32s(0xffff_0000));
        [simd.transmute_f32s_u32s(low), simd.transmute_f32s_u32s(high)]
    }
}

/// f16 weights as their bits, the low and the high half.
pub(crate) type F16Line = [[u16; 16]; 2];

impl Line for F16Line {
    #[inline(always)]
    fn widens<S: Simd>(simd: S, rows: usize) -> bool {
        rows > 4 && !simd::widens_at_once(simd)
    }

    fn set(&mut self, c: usize, w: f32) {
        self[c / 16][c % 16] = half::f16::from_f32(w).to_bits();
    }

    fn get(&self, c: usize) -> f32 {
        half::f16::from_bits(self[c / 16][c % 16]).to_f32()
    }

    #[inline(always)]
    fn load<S: Simd>(&self, simd: S, v: usize) -> [S::f32s; 2] {
        let [low, high] = self;
        [simd::widen(simd, low, v), simd::widen(simd, high, v)]
    }
}

/// f32 weights.
pub(crate) type F32Line = [[f32; 16]; 2];

impl Line for F32Line {
    fn set(&mut self, c: usize, w: f32) {
        self[c / 16][c % 16] = w;
    }

    fn get(&self, c: usize) -> f32 {
        self[c / 16][c % 16]
    }

    #[inline(always)]
    fn load<S: Simd>(&self, _: S, v: usize) -> [S::f32s; 2] {
        let [low, high] = self;
        [S::as_simd_f32s(low).0[v], S::as_simd_f32s(high).0[v]]
    }
}

/// `wide` becomes the lines of a panel in f32.
#[inline(always)]
pub(crate) fn widen<S: Simd, L: Line>(s: S, panel: &[L], wide: &mut Vec<F32Line>) {
    wide.resize(panel.len(), [[0.0; 16]; 2]);
    for (line, [low, high]) in panel.iter().zip(wide) {
        for v in 0..16 / S::F32_LANES {
            let [l, h] = line.load(s, v);
            S::as_mut_simd_f32s(low).0[v] = l;
            S::as_mut_simd_f32s(high).0[v] = h;
        }
    }
}

/// Most rows of x that one tile takes with this machine's registers.
pub(crate) fn max_rows() -> usize {
    if simd::width() == 16 { 8 } else { 6 }
}

/// Sizes of the row tiles for `m` rows: as equal as can be, each at most [`max_rows`].
pub(crate) fn row_tiles(m: usize) -> impl Iterator<Item = usize> + Clone {
    let tiles = m.div_ceil(max_rows()).max(1);
    (0..tiles).map(move |t| m / tiles + usize::from(t < m % tiles))
}

/// `out[r][c] = sum over k of x[k][r] * w[k][c]`: each element one chain of FMAs in the order of k.
///
/// `x` is a tile as packed by the caller: `rows` values for each k.
#[inline(always)]
pub(crate) fn panel_times_tile<S: Simd, L: Line>(s: S, panel: &[L], x: &[f32], rows: usize, out: &mut [[f32; PANEL]]) {
    match rows {
        1 => fixed::<S, L, 1>(s, panel, x, out),
        2 => fixed::<S, L, 2>(s, panel, x, out),
        3 => fixed::<S, L, 3>(s, panel, x, out),
        4 => fixed::<S, L, 4>(s, panel, x, out),
        5 => fixed::<S, L, 5>(s, panel, x, out),
        6 => fixed::<S, L, 6>(s, panel, x, out),
        7 => fixed::<S, L, 7>(s, panel, x, out),
        8 => fixed::<S, L, 8>(s, panel, x, out),
        _ => {} // `row_tiles` makes no others
    }
}

/// Two panels at once, for so few rows that one panel's chains would wait for each other. `false`, with nothing done,
/// where the tile has more.
#[inline(always)]
pub(crate) fn two_panels_times_tile<S: Simd, L: Line>(
    s: S,
    panels: [&[L]; 2],
    x: &[f32],
    rows: usize,
    out: [&mut [[f32; PANEL]]; 2],
) -> bool {
    match (S::F32_LANES, rows) {
        (16, 1) => pair::<S, L, 1, 1>(s, panels, x, out),
        (16, 2) => pair::<S, L, 2, 1>(s, panels, x, out),
        (16, 3) => pair::<S, L, 3, 1>(s, panels, x, out),
        (8, 1) => pair::<S, L, 1, 2>(s, panels, x, out),
        _ => return false,
    }
    true
}

/// The FMA chains of `R` rows by all `V` vectors of both halves of two panels.
#[inline(always)]
fn pair<S: Simd, L: Line, const R: usize, const V: usize>(
    s: S,
    panels: [&[L]; 2],
    x: &[f32],
    out: [&mut [[f32; PANEL]]; 2],
) {
    let mut acc = [[[[s.splat_f32s(0.0); 2]; V]; R]; 2];
    let [first, second] = panels;
    for ((a, b), x) in first.iter().zip(second).zip(x.as_chunks::<R>().0) {
        step(s, a, x, 0, &mut acc[0]);
        step(s, b, x, 0, &mut acc[1]);
    }
    for (acc, out) in acc.iter().zip(out) {
        store(s, acc, 0, out);
    }
}

/// A tile of `R` rows, by as many vectors at a time as the registers hold.
#[inline(always)]
fn fixed<S: Simd, L: Line, const R: usize>(s: S, panel: &[L], x: &[f32], out: &mut [[f32; PANEL]]) {
    let x = x.as_chunks::<R>().0;
    match S::F32_LANES {
        16 => chain::<S, L, R, 1>(s, panel, x, 0, out),
        8 if R <= 2 => chain::<S, L, R, 2>(s, panel, x, 0, out),
        8 => {
            chain::<S, L, R, 1>(s, panel, x, 0, out);
            chain::<S, L, R, 1>(s, panel, x, 1, out);
        }
        width => {
            for v in 0..16 / width {
                chain::<S, L, R, 1>(s, panel, x, v, out);
            }
        }
    }
}

/// The FMA chains of `R` rows by vectors `v0..v0 + V` of both halves of a panel.
#[inline(always)]
fn chain<S: Simd, L: Line, const R: usize, const V: usize>(
    s: S,
    panel: &[L],
    x: &[[f32; R]],
    v0: usize,
    out: &mut [[f32; PANEL]],
) {
    let mut acc = [[[s.splat_f32s(0.0); 2]; V]; R];
    for (line, x) in panel.iter().zip(x) {
        step(s, line, x, v0, &mut acc);
    }
    store(s, &acc, v0, out);
}

/// One k.
#[inline(always)]
fn step<S: Simd, L: Line, const R: usize, const V: usize>(
    s: S,
    line: &L,
    x: &[f32; R],
    v0: usize,
    acc: &mut [[[S::f32s; 2]; V]; R],
) {
    let mut w = [[s.splat_f32s(0.0); 2]; V];
    for (v, w) in w.iter_mut().enumerate() {
        *w = line.load(s, v0 + v);
    }
    for (acc, &x) in acc.iter_mut().zip(x) {
        let x = s.splat_f32s(x);
        for (acc, w) in acc.iter_mut().zip(&w) {
            acc[0] = s.mul_add_f32s(x, w[0], acc[0]);
            acc[1] = s.mul_add_f32s(x, w[1], acc[1]);
        }
    }
}

/// Write a tile's sums to their columns.
#[inline(always)]
fn store<S: Simd, const R: usize, const V: usize>(
    _: S,
    acc: &[[[S::f32s; 2]; V]; R],
    v0: usize,
    out: &mut [[f32; PANEL]],
) {
    for (acc, out) in acc.iter().zip(out) {
        let (low, high) = out.split_at_mut(16);
        for (v, acc) in acc.iter().enumerate() {
            S::as_mut_simd_f32s(low).0[v0 + v] = acc[0];
            S::as_mut_simd_f32s(high).0[v0 + v] = acc[1];
        }
    }
}
