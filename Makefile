# One way to do each chore. CONTRIBUTING.md has what `make build` and `make deb` need. `make demo` and `make test` set up whatever
# is missing, on Debian 12 with git, make, gcc, curl and a Rust toolchain.

PREFIX  ?= /usr/local
DESTDIR ?=
CARGO   ?= cargo

TARGET  := $(or $(CARGO_TARGET_DIR),target)
# What was built for another processor, where TRIPLE names that, and what runs here.
TRIPLE  ?=
RELEASE := $(TARGET)/$(if $(TRIPLE),$(TRIPLE)/)release
NATIVE  := $(TARGET)/release
BIN     := $(DESTDIR)$(PREFIX)/bin
LIB     := $(DESTDIR)$(PREFIX)/lib/shunt
DEBUG   := $(DESTDIR)$(PREFIX)/lib/debug/.build-id
SHARE   := $(DESTDIR)$(PREFIX)/share
UNITS   := $(DESTDIR)$(PREFIX)/lib/systemd
SYSTEMD := $(patsubst packaging/systemd/%,%,$(wildcard packaging/systemd/*/*))

# What a debugger reads is taken out of what is installed. Package builders do that themselves, and say STRIP=no.
STRIP   ?= yes
OBJCOPY := $(if $(TRIPLE),$(subst -unknown,,$(TRIPLE))-)objcopy

# Some tests make namespaces and files of other users. Only the tests themselves run as root, not the compiler.
AS_ROOT := $(if $(filter 0,$(shell id -u)),,--runner $(CURDIR)/scripts/as-root)

.PHONY: build book cross-arm64 demo test test-long lint loom fuzz man python deb deb-arm64 repo test-deb-arm64 rpm install install-debug uninstall setup clean help

help:
	@echo "make demo       build, and compare TCP, Unix sockets and shunt under real load (a minute)"
	@echo "make test       build, and run the tests that decide whether shunt is correct"
	@echo "make test-long  build, and run the others: benchmarks, scale, containers, third-party programs"
	@echo "make install    into PREFIX=$(PREFIX), below DESTDIR if that is set"
	@echo "make install-debug  the debug symbols of what install puts there"
	@echo "make uninstall  take away what install put there"
	@echo "make deb        the Debian packages, into DEB=$(TARGET)/deb; their debug symbols into debug/ there"
	@echo "make deb-arm64  the same for 64-bit ARM, into DEB=$(TARGET)/deb-arm64; make test-deb-arm64 looks at them"
	@echo "make repo       an apt repository of them, into REPO=$(TARGET)/repo, signed by the key KEY if that is set"
	@echo "make rpm        the packages of rpm's kind, into RPM=$(TARGET)/rpm"
	@echo "make python     the message channel for Python 3.11 and later: a wheel, into target/python"
	@echo "make fuzz       look for bugs in what reads strangers' bytes, for SECONDS=60 each (nightly, cargo-fuzz)"
	@echo "make cross-arm64  build for 64-bit ARM, into $(ARM64)/release"
	@echo "make book       the documentation as a site with search, its links checked (cargo install mdbook --locked)"
	@echo "make build, lint, loom, man, setup, clean"

# Packages have every kernel program: without them a broker cannot pair containers.
deb deb-arm64 rpm: export SHUNT_BPF := required

build:
	@test "$$SHUNT_BPF" != required || command -v $${CLANG:-clang} > /dev/null || \
	    { echo "install clang first, packages need it for kernel programs: apt-get install clang libbpf-dev" >&2; exit 1; }
	$(CARGO) build --release -p shunt-cli -p shunt-bench -p shunt-shim -p shunt-channel-c

# With the differential tester, for tests/libc/run --arm64.
ARM64_TRIPLE := aarch64-unknown-linux-gnu
ARM64 := $(TARGET)/$(ARM64_TRIPLE)
cross-arm64:
	@command -v aarch64-linux-gnu-gcc > /dev/null || \
	    { echo "install the cross compiler first: apt-get install gcc-aarch64-linux-gnu libc6-dev-arm64-cross" >&2; exit 1; }
	rustup target add $(ARM64_TRIPLE)
	CARGO_TARGET_AARCH64_UNKNOWN_LINUX_GNU_LINKER=aarch64-linux-gnu-gcc $(CARGO) build --release --target $(ARM64_TRIPLE) \
	    -p shunt-cli -p shunt-bench -p shunt-shim -p shunt-channel-c -p shunt-differential

demo: setup build
	@scripts/demo $(NATIVE)/shunt

test: setup build
	scripts/test --suite correctness $(AS_ROOT) $(CARGO) --workspace

test-long: setup build
	scripts/test --suite long $(AS_ROOT) $(CARGO) --workspace

lint:
	$(CARGO) fmt --all --check
	$(CARGO) clippy --workspace --all-targets -- -D warnings
	$(CARGO) deny --all-features check licenses bans sources

# All interleavings of the lanes and of the two directions of an endpoint; a target directory of its own because
# everything is compiled differently.
loom:
	RUSTFLAGS="--cfg loom" CARGO_TARGET_DIR=$(TARGET)/loom CARGO_PROFILE_RELEASE_LTO=off $(CARGO) test --release -p shunt-ring -p shunt-transport

# What libFuzzer finds new goes into the corpora, which `cargo test` runs too.
FUZZ := tests/fuzz/libfuzzer
fuzz:
	for target in capture channel control endpoint http lane link memcached page resp thrift; do \
	    $(CARGO) +nightly fuzz run --fuzz-dir $(FUZZ) $$target tests/fuzz/corpus/$$target -- \
	        -max_total_time=$(or $(SECONDS),60) -max_len=4096 || exit; \
	done

book:
	scripts/book

# The build needs no Python: the library uses Python's stable interface. Any Python 3 packs it.
python:
	$(CARGO) build --release -p shunt-channel-python
	scripts/wheel $(NATIVE)/libshunt_channel_python.so $(TARGET)/python

man: build
	$(NATIVE)/shunt man $(TARGET)/man

of_cargo = $$(sed -n 's/^$(1) = "\(.*\)"/\1/p' Cargo.toml | head -1)
COPY := tar -c --exclude=./target --exclude=./.git --exclude=./examples/state . | tar -x -C
# From a copy, so that nobody has to tidy up what is made on the way. What cargo has built is BUILT.
DEB ?= $(TARGET)/deb
deb: build
# The manual pages and completions are printed by the command that was built for this machine.
deb-arm64: build cross-arm64
deb-arm64: DEB := $(TARGET)/deb-arm64
deb-arm64: export TRIPLE := $(ARM64_TRIPLE)
deb deb-arm64:
	@command -v dh > /dev/null || { echo "install debhelper first: apt-get install debhelper" >&2; exit 1; }
	@test "$$(dpkg-parsechangelog -S Version)" = "$(call of_cargo,version)" || \
	    { echo "debian/changelog and Cargo.toml have different versions" >&2; exit 1; }
	rm -rf $(DEB) && mkdir -p $(DEB)/shunt
	$(COPY) $(DEB)/shunt
	cd $(DEB)/shunt && BUILT=yes CARGO_TARGET_DIR=$(abspath $(TARGET)) dpkg-buildpackage -b -us -uc -d $(if $(TRIPLE),--host-arch arm64)
	mkdir $(DEB)/debug && mv $(DEB)/*-dbgsym_*.deb $(DEB)/debug
	rm -rf $(DEB)/shunt

test-deb-arm64: deb-arm64
	tests/package/arm64 $(TARGET)/deb-arm64/*.deb

# An apt repository of what `make deb` makes: docs/usage.md has how to serve it.
REPO ?= $(TARGET)/repo
repo: deb
	rm -rf $(REPO)
	scripts/repo $(REPO) $(DEB)/*.deb

# The same of rpm's kind, for systems with glibc 2.28 or newer.
RPM ?= $(TARGET)/rpm
rpm: build
	@command -v rpmbuild > /dev/null || { echo "install rpmbuild first: apt-get install rpm" >&2; exit 1; }
	rm -rf $(RPM) && mkdir -p $(RPM)/shunt
	$(COPY) $(RPM)/shunt
	CARGO_TARGET_DIR=$(abspath $(TARGET)) rpmbuild -bb packaging/rpm/shunt.spec \
	    --define "version_of_cargo $(call of_cargo,version)" \
	    --define "licence_of_cargo $(call of_cargo,license)" \
	    --define "_topdir $(abspath $(RPM))/work" --define "_builddir $(abspath $(RPM))/shunt" --define "_rpmdir $(abspath $(RPM))" \
	    --define "_build_name_fmt %%{NAME}-%%{VERSION}-%%{RELEASE}.%%{ARCH}.rpm"
	mkdir $(RPM)/debug && mv $(RPM)/*-debuginfo-*.rpm $(RPM)/debug
	rm -rf $(RPM)/shunt $(RPM)/work

setup:
	@scripts/setup

# $(call program,MODE,FILE,DIRECTORY): a program or a library that cargo has built.
define program
	install -D -m $(1) $(RELEASE)/$(2) $(3)/$(2)
	$(if $(filter no,$(STRIP)),,$(OBJCOPY) --strip-unneeded $(3)/$(2))
endef

# With sudo, what was built before is installed: root may have no toolchain, and should own nothing in ./target.
install: $(if $(SUDO_USER)$(BUILT),,build)
	@test -x $(RELEASE)/shunt || { echo "nothing to install: run 'make build' first, without sudo" >&2; exit 1; }
	$(call program,755,shunt,$(BIN))
	$(call program,755,shunt-bench,$(LIB))
	ln -sf shunt $(BIN)/shunt-runtime
	$(call program,644,libshunt.so,$(LIB))
	$(call program,644,libshunt_channel_c.so,$(DESTDIR)$(PREFIX)/lib)
	install -D -m 644 $(RELEASE)/libshunt_channel_c.a $(DESTDIR)$(PREFIX)/lib/libshunt_channel_c.a
	install -D -m 644 crates/channel/channel-c/include/shunt_channel.h $(DESTDIR)$(PREFIX)/include/shunt_channel.h
	install -D -m 644 crates/channel/channel-c/include/shunt_channel.hpp $(DESTDIR)$(PREFIX)/include/shunt_channel.hpp
	install -d $(SHARE)/man/man1 $(SHARE)/man/man5 $(SHARE)/bash-completion/completions $(SHARE)/zsh/site-functions \
	    $(SHARE)/fish/vendor_completions.d $(UNITS)/system $(UNITS)/user
	$(NATIVE)/shunt man $(SHARE)/man/man1
	mv $(SHARE)/man/man1/shunt.toml.5 $(SHARE)/man/man5
	$(NATIVE)/shunt completions bash > $(SHARE)/bash-completion/completions/shunt
	$(NATIVE)/shunt completions zsh > $(SHARE)/zsh/site-functions/_shunt
	$(NATIVE)/shunt completions fish > $(SHARE)/fish/vendor_completions.d/shunt.fish
	for unit in $(SYSTEMD); do \
	    sed 's|@BIN@|$(PREFIX)/bin|' packaging/systemd/$$unit > $(UNITS)/$$unit || exit; \
	done

# Where gdb looks for them by the build id.
build_id = $$(readelf --notes $(1) | sed -n 's/.*Build ID: //p')
install-debug:
	for file in shunt shunt-bench libshunt.so libshunt_channel_c.so; do \
	    id=$(call build_id,$(RELEASE)/$$file) && at=$(DEBUG)/$${id%"$${id#??}"} && install -d $$at && \
	    $(OBJCOPY) --only-keep-debug --compress-debug-sections $(RELEASE)/$$file $$at/$${id#??}.debug || exit; \
	done

uninstall:
	for file in $(wildcard $(BIN)/shunt $(LIB)/shunt-bench $(LIB)/libshunt.so $(DESTDIR)$(PREFIX)/lib/libshunt_channel_c.so); do \
	    id=$(call build_id,$$file) && rm -f $(DEBUG)/$${id%"$${id#??}"}/$${id#??}.debug; \
	done
	rm -f $(foreach kind,so a,$(DESTDIR)$(PREFIX)/lib/libshunt_channel_c.$(kind)) \
	    $(foreach kind,h hpp,$(DESTDIR)$(PREFIX)/include/shunt_channel.$(kind))
	rm -f $(BIN)/shunt $(BIN)/shunt-runtime $(LIB)/shunt-bench $(LIB)/libshunt.so $(SHARE)/man/man1/shunt.1 $(SHARE)/man/man1/shunt-*.1 $(SHARE)/man/man5/shunt.toml.5
	rm -f $(SHARE)/bash-completion/completions/shunt $(SHARE)/zsh/site-functions/_shunt
	rm -f $(SHARE)/fish/vendor_completions.d/shunt.fish
	rm -f $(addprefix $(UNITS)/,$(SYSTEMD))
	-rmdir $(LIB)

clean:
	$(CARGO) clean
