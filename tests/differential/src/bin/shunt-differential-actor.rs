//! An actor of the differential tester: a process that executes orders from its standard input.

fn main() {
    shunt_differential::actor::run(std::env::args().skip(1).collect());
}
