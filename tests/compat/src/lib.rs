//! Programs that nobody here wrote, run natively and under shunt.
