"""How entries are written on the wire: `formats` counts the bytes, `codec` writes and reads.

A format of another package derives from `formats.WireFormat`: `Scheme(wire="module:MEMBER")`.

A Sparse becomes one flat buffer of exact size, so that it takes one collective:

    pair32          k int32 indices, k float32 values                             8 B an entry
    pair16/DTYPE    k int32 indices, k 16-bit values                              6 B
    block16/DTYPE   one int32 count per block of 65,536 entries of the vector,
                    k uint16 offsets into their blocks, k values                  4 B, or 6 B
                                                                                  with float32
    elias/DTYPE     indices by Elias-Fano coding, at most 2 + log2(size / k)      at 1 %: 2.1 B, or
                    bits each; k values: float32, float16, or codes of            1.6 B with int4
                    8 or 4 bits (int8, int4) in blocks of 32 that share a
                    16-bit step

Buffers are int32 words, which every engine carries (NCCL knows no 16-bit integers); 16-bit parts of
odd length end in two zero bytes. The size depends on k and the vector's length only, so that
Horovod's cache of all-gathers stays valid.

A dense route may write its entries narrower than they are added: in float32, float16 or bfloat16.
"""
