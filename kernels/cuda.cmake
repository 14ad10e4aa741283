# Finds a CUDA toolkit that can build the CUDA backend, or says why there is none and goes on.
# Result: CUDA_ENABLED, and the targets dtrain_cuda_libraries (runtime, cuBLASLt) and dtrain_cuda_test_libraries
# (cuDNN and NCCL where found, and then DTRAIN_CUDNN and DTRAIN_NCCL are defined).
set(CUDA_ENABLED FALSE)

function(dtrain_no_cuda reason)
  if(WITH_CUDA AND REQUIRE_CUDA)
    message(FATAL_ERROR "CUDA is required and can not be used: ${reason}")
  endif()
  message(STATUS "CUDA backend: off (${reason})")
endfunction()

if(NOT WITH_CUDA)
  dtrain_no_cuda("WITH_CUDA is off")
  return()
endif()

find_program(NVCC nvcc PATHS /usr/local/cuda/bin)
if(NOT NVCC)
  dtrain_no_cuda("no nvcc on PATH or in /usr/local/cuda")
  return()
endif()
execute_process(COMMAND ${NVCC} --version OUTPUT_VARIABLE NVCC_TEXT ERROR_QUIET)
string(REGEX MATCH "release ([0-9]+\\.[0-9]+)" NVCC_TEXT "${NVCC_TEXT}")
set(NVCC_RELEASE "${CMAKE_MATCH_1}")
if(NVCC_RELEASE VERSION_LESS 12.0)
  dtrain_no_cuda("${NVCC} is of CUDA '${NVCC_RELEASE}', 12.0 or newer is needed")
  return()
endif()

# The first GPU of this machine by default, Hopper where there is none; a release for all is
# -DCMAKE_CUDA_ARCHITECTURES="80;90a;120" (preset cuda).
if(NOT CMAKE_CUDA_ARCHITECTURES)
  set(FOUND_ARCHITECTURE 90a)
  execute_process(COMMAND nvidia-smi --query-gpu=compute_cap --format=csv,noheader
    OUTPUT_VARIABLE GPU_TEXT ERROR_QUIET)
  if(GPU_TEXT MATCHES "^([0-9]+)\\.([0-9])" AND NOT CMAKE_MATCH_0 STREQUAL "9.0")
    set(FOUND_ARCHITECTURE ${CMAKE_MATCH_1}${CMAKE_MATCH_2})
  endif()
  set(CMAKE_CUDA_ARCHITECTURES ${FOUND_ARCHITECTURE} CACHE STRING
    "GPU architectures to compile for" FORCE)
endif()
if(NVCC_RELEASE VERSION_LESS 12.8 AND "120" IN_LIST CMAKE_CUDA_ARCHITECTURES)
  message(STATUS "CUDA ${NVCC_RELEASE} does not know sm_120: left out")
  list(REMOVE_ITEM CMAKE_CUDA_ARCHITECTURES 120)
endif()

include(CheckLanguage)
set(ENV{CUDACXX} ${NVCC})
check_language(CUDA)
if(NOT CMAKE_CUDA_COMPILER)
  dtrain_no_cuda("${NVCC} does not compile here, see CMakeFiles/CMakeError.log")
  return()
endif()
enable_language(CUDA)
find_package(CUDAToolkit QUIET)
if(NOT TARGET CUDA::cublasLt OR NOT TARGET CUDA::cudart)
  dtrain_no_cuda("cuBLASLt or the CUDA runtime is missing")
  return()
endif()
set(CMAKE_CUDA_STANDARD 17)
set(CMAKE_CUDA_EXTENSIONS OFF)
set(CMAKE_CUDA_FLAGS_RELEASE "-O3")

add_library(dtrain_cuda_libraries INTERFACE)
# What looks for a profiler (NVTX) opens libraries.
target_link_libraries(dtrain_cuda_libraries INTERFACE CUDA::cudart CUDA::cublasLt ${CMAKE_DL_LIBS})
target_include_directories(dtrain_cuda_libraries INTERFACE ${CUDAToolkit_INCLUDE_DIRS})

# What only tests use: a program must start where these are not there.
add_library(dtrain_cuda_test_libraries INTERFACE)

# dtrain_cuda_optional(CUDNN cudnn.h cudnn): links the library where both parts are found.
function(dtrain_cuda_optional name header library)
  find_path(${name}_INCLUDE ${header} HINTS ${CUDAToolkit_INCLUDE_DIRS})
  find_library(${name}_LIBRARY ${library} HINTS ${CUDAToolkit_LIBRARY_DIR})
  if(${name}_INCLUDE AND ${name}_LIBRARY)
    target_include_directories(dtrain_cuda_test_libraries INTERFACE ${${name}_INCLUDE})
    target_link_libraries(dtrain_cuda_test_libraries INTERFACE ${${name}_LIBRARY})
    target_compile_definitions(dtrain_cuda_test_libraries INTERFACE DTRAIN_${name})
  endif()
  message(STATUS "CUDA backend: ${library} ${${name}_LIBRARY}")
endfunction()
dtrain_cuda_optional(CUDNN cudnn.h cudnn)
dtrain_cuda_optional(NCCL nccl.h nccl)

set(CUDA_ENABLED TRUE)
message(STATUS "CUDA backend: CUDA ${NVCC_RELEASE}, architectures ${CMAKE_CUDA_ARCHITECTURES}")
