//! `rope_kv`: from a qkv product to queries, and keys and values in the cache.

use super::faults::Report;

declare! {
    ids {
        Kernel {
            KERNEL_ROPE_KV = 20: "rope_kv",
        }
        Buffer {
            BUFFER_ROPE_TABLE = 35: "rope table",
            BUFFER_CACHE_SLOT = 36: "cache (slot)",
        }
    }
    structs {
        /// Parameters of `cuda/rope_kv.cu`, passed by value. Strides are elements from row to row.
        RopeKvParams {
            /// `[rows, (heads + 2 * kv_heads) * head_dim]`: queries, keys, values.
            qkv: u64,
            /// `[rows, heads * head_dim]`; 0 without query heads.
            q: u64,
            /// `[num_slots, kv_heads, head_dim]`: keys of the layer.
            cache_k: u64,
            /// Values of the layer, in the form of `cache_k`.
            cache_v: u64,
            /// `int32[rows]`.
            positions: u64,
            /// `int32[rows]`.
            slots: u64,
            /// `float[positions_in_table, half]`.
            cos: u64,
            /// `float[positions_in_table, half]`.
            sin: u64,
            /// `[(heads + 2 * kv_heads) * head_dim]`; 0 for none.
            bias: u64,
            /// `[head_dim]`; 0 for none.
            q_norm: u64,
            /// `[head_dim]`; 0 for none.
            k_norm: u64,
            /// Destination of faults.
            report: Report,
            /// Stride of `qkv`.
            qkv_stride: u64,
            /// Stride of `q`.
            q_stride: u64,
            /// Rows.
            rows: i32,
            /// Query heads.
            heads: i32,
            /// Key heads, as many as value heads.
            kv_heads: i32,
            /// Elements of a head; even.
            head_dim: i32,
            /// Pairs that are rotated; at most `head_dim / 2`.
            half: i32,
            /// Rows of `cos` and `sin`.
            positions_in_table: i32,
            /// Slots of the cache; slot 0 is the sink.
            num_slots: i32,
            /// Bits of the f32 added to a head's mean square.
            eps_bits: u32,
            /// 1 where every operand can be read and written in vectors of 16 bytes.
            wide: u32,
            /// 1 where the norms' weights are of f32, 0 where they are of the element type.
            norm_f32: u32,
        }
    }
}
