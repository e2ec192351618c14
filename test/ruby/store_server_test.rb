# frozen_string_literal: true

require_relative "test_helper"

# The server that a TCPStore hosts, as the environment sets it up.
class StoreServerTest < Minitest::Test
  def host(&block)
    store = Distributed::TCPStore.new("127.0.0.1", 0, nil, true)
    block.call(store)
  ensure
    store&.close
  end

  def connect(store)
    client = Distributed::TCPStore.new("127.0.0.1", store.port, timeout: 10)
    yield client
  ensure
    client&.close
  end

  def test_both_ends_find_the_secret
    with_env("TDDP_STORE_SECRET" => "open sesame, please") do
      host do |store|
        store.set("a", "1")
        connect(store) { |client| assert_equal "1", client.get("a") }
      end
    end
  end

  def test_one_end_alone_is_told_so
    with_env("TDDP_STORE_SECRET" => "open sesame, please") do
      host do |store|
        with_env("TDDP_STORE_SECRET" => nil) do
          error = assert_raises(Distributed::StoreError) { connect(store) {} }
          assert_match(/serves only clients that know its secret: set TDDP_STORE_SECRET/, error.message)
        end
        with_env("TDDP_STORE_SECRET" => "open barley, please") do
          error = assert_raises(Distributed::StoreError) { connect(store) {} }
          assert_match(/the server's secret is another than TDDP_STORE_SECRET here/, error.message)
        end
      end
    end
    host do |store|
      with_env("TDDP_STORE_SECRET" => "open sesame, please") do
        error = assert_raises(Distributed::StoreError) { connect(store) {} }
        assert_match(/TDDP_STORE_SECRET is set here, but not for the server/, error.message)
      end
    end
  end

  def test_an_empty_secret_is_refused
    with_env("TDDP_STORE_SECRET" => "") do
      error = assert_raises(Distributed::InvalidArgumentError) { host {} }
      assert_match(/TDDP_STORE_SECRET is empty/, error.message)
    end
  end

  def test_limits_of_the_environment
    with_env("TDDP_STORE_MAX_VALUE_BYTES" => "10") do
      host do |store|
        store.set("a", "x" * 10)
        assert_equal "x" * 10, store.get("a")
        connect(store) do |client|
          client.set("b", "x" * 11)
          assert_raises(Distributed::NetworkError) { client.get("b") }
        end
        refute store.check(["b"])
      end
    end
    with_env("TDDP_STORE_MAX_CLIENTS" => "many") do
      error = assert_raises(Distributed::InvalidArgumentError) { host {} }
      assert_match(/TDDP_STORE_MAX_CLIENTS is "many": expected a whole number of 1 or more/, error.message)
    end
  end

  def test_a_loopback_host_listens_to_this_host_alone
    host { |store| assert_equal ["0100007F"], listening(store.port) }
    store = Distributed::TCPStore.new("localhost", 0, nil, true)
    refute_includes listening(store.port), "0" * 8
    refute_includes listening(store.port), "0" * 32
    assert_equal "localhost", store.host
  ensure
    store&.close
  end
end
