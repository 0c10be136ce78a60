//! Runs an attack: see [`shunt_hostile_host::attack`].

fn main() {
    shunt_hostile_host::attack::main();
}
