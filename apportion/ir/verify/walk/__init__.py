"""The proof that programs are right: one compiled walk over each rank."""
