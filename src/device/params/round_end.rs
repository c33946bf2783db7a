//! `round_end`: the words of a ring's slot and of the control block, and its parameters.

use super::faults::Report;

declare! {
    constants {
        /// Words of a slot of a ring before its lanes; the constants of a round are those of `round::round_end`.
        ROUND_HEADER = 16,
        /// Word of a slot: r while round r writes it, r + 1 once all of it is there.
        ROUND_SEQUENCE_AT = 0,
        /// Word of a slot: the round's number.
        ROUND_NUMBER_AT = 1,
        /// Word of a slot: live lanes.
        ROUND_LIVE_AT = 2,
        /// Word of a slot: why no further round should follow.
        ROUND_EXIT_AT = 3,
        /// Word of a slot: 1 where another round follows in the same launch.
        ROUND_CONTINUES_AT = 4,
        /// First of two words of a slot: nanoseconds of the device's clock.
        ROUND_TIME_AT = 6,
        /// Exit bit: a live lane is done.
        EXIT_DONE = 1,
        /// Exit bit: a lane's target scores were no numbers.
        EXIT_NAN = 2,
        /// Exit bit: a root's draft scores give no distribution.
        EXIT_UNSOUND = 4,
        /// Exit bit: an access was recorded that the host has not read.
        EXIT_FAULT = 8,
        /// Exit bit: the host asked.
        EXIT_ASKED = 16,
        /// Exit bit: the rounds of the launch are used up.
        EXIT_BUDGET = 32,
        /// Word of the control block: rounds that have ended, the number of the next.
        CONTROL_ROUNDS = 0,
        /// Word of the control block: rounds of the launch that are left.
        CONTROL_LEFT = 1,
        /// Word of the control block: exit bits of the last round.
        CONTROL_EXIT = 2,
        /// Word of the control block: blocks of the launch that are through; 0 between launches.
        CONTROL_TICKET = 3,
        /// Words of the control block.
        CONTROL_WORDS = 4,
    }
    ids {
        Kernel {
            KERNEL_ROUND_END = 40: "round_end",
        }
        Buffer {
            BUFFER_NEW_LENGTHS = 80: "new lengths (length plus accepted nodes)",
            BUFFER_STOPS = 81: "stop tokens",
        }
    }
    structs {
        /// Parameters of `cuda/round_end.cu`, passed by value.
        RoundEndParams {
            /// `int32[batch + 1]`: first token of each lane's path.
            offsets: u64,
            /// `int32[entries]`: tokens drawn along accepted paths.
            tokens: u64,
            /// `int32[batch]`: committed lengths with the accepted nodes.
            new_lens: u64,
            /// `int32[batch]`: the next roots.
            roots_found: u64,
            /// `int32[batch]`: not 0 where the target's scores were no numbers.
            faults: u64,
            /// `int32[batch]`: sound draft steps.
            sound: u64,
            /// `int32`: live lanes.
            live: u64,
            /// `int32[batch]`: committed length at which a request has ended.
            limits: u64,
            /// `int32[batch]`: deepest level of drafts wanted.
            caps: u64,
            /// `int32[batch * places]`: tokens that end a request.
            stops: u64,
            /// `int32[batch]`: places used.
            stop_counts: u64,
            /// `int32[batch]`, in and out: committed lengths.
            lens: u64,
            /// `int32[batch]`, in and out: roots.
            roots: u64,
            /// `int32[batch]`, in and out: levels of drafts.
            depths: u64,
            /// `int32[batch]`, in and out: not 0 for a lane that has ended.
            done: u64,
            /// `int32[CONTROL_WORDS]`, in and out.
            control: u64,
            /// `int32[words]`: what the round found, for the host.
            found: u64,
            /// `int32[(slot_mask + 1) * slot_words]`: the ring, in mapped host memory.
            ring: u64,
            /// `int32` in mapped host memory: not 0 where the host asks for an end.
            stop: u64,
            /// Destination of faults.
            report: Report,
            /// Handle of the conditional node that runs the rounds; 0 where there is none.
            handle: u64,
            /// Lanes.
            batch: i32,
            /// Capacity of `tokens`.
            entries: i32,
            /// Places for a lane's stop tokens.
            places: i32,
            /// Words of `found`.
            words: i32,
            /// Slots of the ring less one; the slots are a power of two.
            slot_mask: u32,
            /// Words from slot to slot.
            slot_words: i32,
            /// First word of the lengths in a slot.
            lens_at: i32,
            /// First word of the depths in a slot.
            depths_at: i32,
            /// First word of what the round found in a slot; a multiple of 4.
            found_at: i32,
            /// 1 where `found` can be read in vectors of 16 bytes.
            wide: u32,
        }
    }
}
