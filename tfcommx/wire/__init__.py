"""How entries are written on the wire: `formats` counts the bytes, `codec` writes and reads.

`core.wire_formats` has the table of formats. One of another package derives from
`formats.WireFormat`: `Scheme(wire="module:MEMBER")`.
"""
