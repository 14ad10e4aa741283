# Two commands: `make demo` and `make test`. Each installs what is missing, builds, and runs.
#   make INSTALL=no ...   never installs packages
#   make BUILD=DIR ...    builds in another folder
# Anything finer is CMake's: see CMakePresets.json.
BUILD ?= build
INSTALL ?= yes
# Places for tests, two a core: tests that compute take two or more, those that mostly wait take one
# (tests/CMakeLists.txt).
JOBS ?= $(shell echo $$((2 * $$(nproc))))

.PHONY: all install configure build test demo clean
all: build

install:
ifneq ($(INSTALL),no)
	@.ci/install
endif

configure: install
	@cmake -S . -B $(BUILD) -G Ninja $(CMAKE_FLAGS)

build: configure
	@cmake --build $(BUILD)

test: build
	@ctest --test-dir $(BUILD) --output-on-failure --parallel $(JOBS) --output-junit tests.xml; \
	status=$$?; .ci/skipped $(BUILD)/tests.xml; exit $$status

demo: configure
	@cmake --build $(BUILD) --target dtrain
	@examples/tiny/demo $(BUILD)

clean:
	rm -rf $(BUILD)
