"""The passes, one file each. Imported as bcg_compiler.passes."""
